"""The whole program on the embedded default: real Ray, real vLLM, real gloo ranks, real files."""
from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from end_to_end_support import ROOT, Run, arguments


def train(tmp_path: Path, run: str, *overrides: str) -> list[dict[str, float]]:
    """Run to the end; the lines of metrics.jsonl."""
    done = subprocess.run(arguments(tmp_path, run, *overrides), cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]


def learning_figures(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    """What has to come out the same again: no timings, no memory, no throughput."""
    prefixes = ("actor/", "critic/", "episode/", "val/", "response_length/", "prompt_length/", "gigpo/")
    return [{key: value for key, value in line.items() if key.startswith(prefixes)} for line in lines]


@pytest.mark.slow
def test_four_steps_equal_two_steps_and_two_more_after_a_resume(tmp_path):
    whole = train(tmp_path, "whole", "trainer.total_training_steps=4")
    train(tmp_path, "parts", "trainer.total_training_steps=2", "trainer.profile_steps=[2]")
    profiles = tmp_path / "parts" / "profile"
    written = [path.relative_to(profiles).as_posix() for path in sorted(profiles.rglob("*.*"))]
    assert written == [f"step_2/update_actor_rank{rank}.{kind}" for rank in (0, 1) for kind in ("json.gz", "txt")]
    assert "aten::mm" in (profiles / written[1]).read_text()
    parts = train(tmp_path, "parts", "trainer.total_training_steps=4", "trainer.val_before_train=False")
    assert [line["step"] for line in whole] == [0, 1, 2, 3, 4]
    assert learning_figures(whole) == learning_figures(parts)

    checkpoint = tmp_path / "whole"
    assert (checkpoint / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert (checkpoint / "global_step_4" / "actor").is_dir() and (checkpoint / "global_step_4" / "data.pt").is_file()
    step = whole[-1]
    phases = [key for key in step if key.startswith("timing_s/") and key != "timing_s/step"]
    assert sum(step[key] for key in phases) == pytest.approx(step["timing_s/step"], rel=1e-6)
    assert step["training/rollout_log_probs_diff_mean"] < 1e-4  # float32: engine and trainer are one model
    borders = "before_rollout rollout after_rollout old_log_prob ref update_actor".split()
    assert [key for key in step if key.startswith("perf/memory_gb/")] == [f"perf/memory_gb/{b}/rss" for b in borders]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("send", "number"),
    [
        pytest.param(os.kill, signal.SIGTERM, id="sigterm", marks=pytest.mark.recipes),  # the group's includes it
        pytest.param(os.killpg, signal.SIGTERM, id="sigterm to its group", marks=pytest.mark.recipes),  # as Ctrl-C
        pytest.param(os.killpg, signal.SIGINT, id="ctrl-c"),
    ],
)
def test_a_signal_saves_a_checkpoint_and_leaves_no_process(tmp_path, send, number):
    with Run(tmp_path, "killed", "trainer.total_training_steps=1000", "trainer.save_freq=-1") as run:
        run.wait_for(lambda: run.has_logged(2))
        send(run.process.pid, number)
        assert run.end() == 128 + number, run.output[-3000:]
        assert not run.wait_until_gone()
    assert int((run.folder / "latest_checkpointed_iteration.txt").read_text()) >= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.train_batch_sise=4", "train_batch_size"),
        ("actor_rollout_ref.model.path=/nowhere/at/all", "actor_rollout_ref.model.path"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=4", "tensor_model_parallel_size"),
        ("env.env_name=chess", "ebshop"),
    ],
)
def test_bad_input_is_answered_at_once_and_leaves_nothing(tmp_path, override, said):
    done = subprocess.run(
        arguments(tmp_path, "bad", override), cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0
    assert said in done.stderr + done.stdout
    assert not (tmp_path / "bad" / "metrics.jsonl").exists()
