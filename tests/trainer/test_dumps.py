"""What a run writes for people: the split beside the scores, folders in the home folder, custom reward files there."""
from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.ppo import dumps
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.utils.tracking import ValidationGenerationsLogger


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_scores_name_the_split_of_their_tasks(tmp_path):
    dumps.write_validation(tmp_path, {"goal-1": 1.0}, {"val/success_rate": 1.0, "val/score": float("nan")}, 5, "00ff")
    written = json.loads((tmp_path / "validation" / "5.json").read_text(), parse_constant=pytest.fail)
    assert (written["split_digest"], written["metrics"]["val/score"]) == ("00ff", None)


def test_a_run_has_no_validations_of_another_and_none_beyond_its_checkpoint(tmp_path):
    for step in (0, 5, 10):
        dumps.write_validation(tmp_path, {"goal-1": 1.0}, {}, step)
        ValidationGenerationsLogger(tmp_path).log({}, [("a", "b", 1.0), ("c", "d", 0.0)], step)
    dumps.claim_run_folder(tmp_path, resume_step=5, val_only=False)
    assert sorted(path.name for path in (tmp_path / "validation").iterdir()) == ["0.json", "5.json"]
    lines = (tmp_path / "generations.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 0, 5, 5]
    dumps.claim_run_folder(tmp_path, resume_step=0, val_only=False)
    assert (tmp_path / "validation.1" / "5.json").is_file()
    dumps.claim_run_folder(tmp_path, resume_step=0, val_only=False)  # nothing of another run is left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["generations.1.jsonl", "validation.1"]


def test_an_evaluation_takes_nothing_from_the_run_whose_folder_it_is_given(tmp_path):
    dumps.write_validation(tmp_path, {"goal-1": 1.0}, {}, 10)
    (tmp_path / "metrics.jsonl").write_text('{"step": 5}\n{"step": 10}\n')
    dumps.claim_run_folder(tmp_path, resume_step=10, val_only=True)
    with pytest.raises(ValueError, match="up to step 10, and this evaluation is of step 5; .* trainer.run_dir=eval_5"):
        dumps.claim_run_folder(tmp_path, resume_step=5, val_only=True)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["10.json", "metrics.jsonl", "validation"]


def test_rollouts_go_to_the_home_folder(home):
    prompts = np.empty(1, dtype=object)
    prompts[0] = np.array([7], dtype=np.int32)
    rows = DataProto.from_dict(
        tensors={
            "responses": torch.tensor([[3, 0]]),
            "response_mask": torch.tensor([[1, 0]]),
            "token_level_scores": torch.tensor([[2.0, 0.0]]),
        },
        non_tensors={"prompt_ids": prompts},
    )
    tokenizer = SimpleNamespace(batch_decode=lambda sequences: [str(ids) for ids in sequences])
    dumps.write_rollout("~/rollouts", rows, tokenizer, 3)
    line = json.loads((home / "rollouts" / "3.jsonl").read_text())
    assert (line["input"], line["output"], line["score"]) == ("[7]", "[3]", 2.0)


def test_a_reward_function_may_lie_in_the_home_folder(home):
    (home / "mine.py").write_text("def score(**columns):\n    return 4.0\n")
    config = SimpleNamespace(
        custom_reward_function=SimpleNamespace(path="~/mine.py", name="score", reward_kwargs={}, extra={})
    )
    assert get_custom_reward_fn(config)() == 4.0
