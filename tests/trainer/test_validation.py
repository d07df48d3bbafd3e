"""What is reported of a validation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.ppo.validation import closing_line, success_by_task, validation_metrics
from verl.utils.logger.metrics_file import MetricsFile
from verl.utils.row_arrays import object_array

EPISODES = [("a", "task1", 3, 1.0), ("b", "task2", 1, 0.0), ("c", "task1", 2, 0.0)]  # name, task, steps, success


def rows() -> DataProto:
    each = [(name, task, steps, won) for name, task, steps, won in EPISODES for _ in range(steps)]
    names, tasks, lengths, won = zip(*each, strict=True)
    return DataProto.from_dict(
        tensors={"responses": torch.zeros(len(each), 1)},
        non_tensors={
            "traj_uid": object_array(names),
            "task_id": object_array(tasks),
            "data_source": object_array(["text"] * len(each)),
            "tool_callings": np.ones(len(each), dtype=np.float32),
            "success_rate": np.array(won, dtype=np.float32),
            "episode_lengths": np.array(lengths, dtype=np.float32),
            "prompt_overflow": np.array([name == "c" for name in names]),
        },
    )


def scores() -> np.ndarray:
    return 10 * rows().non_tensor_batch["success_rate"]


def test_every_episode_counts_once_however_long():
    metrics = validation_metrics(rows(), scores())
    assert metrics["val/episodes"] == 3 and metrics["val/episode_length"] == 2
    assert metrics["val/success_rate"] == pytest.approx(1 / 3)
    assert metrics["val/success_rate_stderr"] == pytest.approx(np.std([1, 0, 0], ddof=1) / 3**0.5)
    assert metrics["val/text/test_score"] == pytest.approx(10 / 3)


def test_an_episode_whose_first_prompt_does_not_fit_is_a_failure():
    failed = [("task3", "text"), ("task4", "other")]
    metrics = validation_metrics(rows(), scores(), failed)
    assert metrics["val/episodes"] == 5 and metrics["val/prompt_overflow"] == 3
    assert metrics["val/success_rate"] == pytest.approx(1 / 5)
    assert metrics["val/success_rate_stderr"] == pytest.approx(np.std([1, 0, 0, 0, 0], ddof=1) / 5**0.5)
    assert metrics["val/text/test_score"] == pytest.approx(10 / 4)
    assert metrics["val/other/test_score"] == 0
    assert metrics["val/episode_length"] == pytest.approx(6 / 5)


def test_a_task_that_is_played_several_times_has_the_mean():
    assert success_by_task(rows(), [("task2", "text"), ("task3", "text")]) == {"task1": 0.5, "task2": 0.0, "task3": 0.0}


def test_the_closing_line_says_what_a_run_brought(tmp_path) -> None:
    run, after = str(tmp_path), {"val/success_rate": 0.578, "val/success_rate_stderr": 0.0438}
    assert "val/success_rate is 0.578 ± 0.044;" in closing_line(15, 15, after, run)  # without a validation before it
    figures = MetricsFile(run)
    figures.log({"val/success_rate": 0.336, "val/success_rate_stderr": 0.0419}, 0)
    for step in (5, 10, 15):  # also of a part that ended, from which the run was resumed at step 10
        figures.log({"val/success_rate": 0.5}, step)
    for trained in (5, 15):
        assert closing_line(15, trained, after, run) == (
            "finished at step 15; val/success_rate was 0.336 ± 0.042 at step 0 and is 0.578 ± 0.044 now; "
            f"every figure is in {run}/metrics.jsonl"
        )
    assert "was 0.336 ± 0.042 at step 0 and is 1.000 now;" in closing_line(15, 5, {"val/success_rate": 1.0}, run)
    assert "success_rate" not in closing_line(15, 15, {}, run)  # never validated afterwards
    said = closing_line(15, 15, after, run, "no checkpoint was kept (trainer.save_freq=-1)")
    assert f"now; no checkpoint was kept (trainer.save_freq=-1); every figure is in {run}/metrics.jsonl" in said
    assert "nothing was left to do" in closing_line(15, 0, {}, run)
    assert "val/success_rate is 0.578 ± 0.044;" in closing_line(15, 0, after, run)  # an evaluation
