"""A saved checkpoint plays the validation tasks as the run that saved it did, resumed or as a Hugging Face folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "preset=embedded",
    "algorithm.adv_estimator=gigpo",
    "data.train_batch_size=2",
    "data.val_batch_size=8",
    "env.rollout.n=2",
    "env.max_steps=6",
    "trainer.logger=[console]",
]


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def validation(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / "validation" / f"{step}.json").read_text())


@pytest.mark.slow
@pytest.mark.recipes
def test_resumed_merged_and_at_the_end_of_training_are_one_policy(tmp_path):
    run("examples.data_preprocess.prepare", "--mode", "text", "--local_dir", str(tmp_path), "--train_data_size", "2",
        "--val_data_size", "8")  # fmt: skip
    files = [f"data.train_files={tmp_path}/text/train.parquet", f"data.val_files={tmp_path}/text/test.parquet"]
    home = f"trainer.default_local_dir={tmp_path}/run"
    run("verl.trainer.main_ppo", *SMALL, *files, home, "trainer.total_training_steps=1", "trainer.save_freq=1",
        "trainer.test_freq=1", "trainer.val_before_train=false")  # fmt: skip
    at_the_end = validation(tmp_path / "run", 1)

    checkpoint = tmp_path / "run" / "global_step_1"
    evaluate = ["trainer.val_only=true", f"trainer.run_dir={tmp_path}/eval", f"trainer.validation_data_dir={tmp_path}/eval/rows"]
    run("verl.trainer.main_ppo", *SMALL, *files, home, *evaluate, "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={checkpoint}")  # fmt: skip
    resumed = validation(tmp_path / "eval", 1)
    rows = [json.loads(line) for line in (tmp_path / "eval" / "rows" / "1.jsonl").read_text().splitlines()]
    assert resumed["success_by_task"] == at_the_end["success_by_task"]
    assert resumed["metrics"] == pytest.approx(at_the_end["metrics"])
    assert len({row["traj_uid"] for row in rows}) == 8
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "1"

    said = run("verl.model_merger", "merge", "--local_dir", str(checkpoint / "actor"), "--target_dir", str(tmp_path / "merged"))
    assert "tensors differ" in said
    evaluate[1] = f"trainer.run_dir={tmp_path}/merged_eval"
    run("verl.trainer.main_ppo", *SMALL, *files, f"trainer.default_local_dir={tmp_path}/merged_eval", *evaluate,
        "trainer.resume_mode=disable", f"actor_rollout_ref.model.path={tmp_path}/merged")  # fmt: skip
    merged = validation(tmp_path / "merged_eval", 0)
    assert merged["success_by_task"] == at_the_end["success_by_task"]
    assert merged["split_digest"] == at_the_end["split_digest"]
