"""Validation: the same tasks, each once, and what is reported of them."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl.protocol import DataProto
from verl.utils.logger.metrics_file import FILE_NAME, read_lines

SUCCESS = "val/success_rate"


@dataclass(frozen=True)
class Sample:
    """One step of a validation episode, as it is shown in the table of generations."""

    prompt: str
    response: str
    score: float


def first_rows(rows: DataProto) -> np.ndarray:
    """Index of the first row of every trajectory: int64 ``(trajectories,)``."""
    _, first = np.unique(rows.non_tensor_batch["traj_uid"].astype(str), return_index=True)
    return np.sort(first)


def success_keys(rows: DataProto) -> list[str]:
    """The columns that hold a per-trajectory success figure."""
    return [key for key in rows.non_tensor_batch if "success_rate" in key]


def validation_metrics(
    rows: DataProto, scores: np.ndarray, failed_without_rows: Sequence[tuple[str, str]] = ()
) -> dict[str, float]:
    """``val/*`` over trajectories, every task counting once however long its episode was.

    ``val/success_rate_stderr`` is the standard error of the mean over tasks. ``test_score`` is the mean over
    trajectories of the mean over a trajectory's rows (verl-agent averages over rows, so that long episodes weigh
    more there).

    Args:
        rows: of all validation episodes.
        scores: ``(rows,)`` what the validation's reward function gave each row: without one of the user's own the
            reward of its episode.
        failed_without_rows: task and data source of the episodes that ended before their first step, because the prompt
            did not fit. They count as failures: score, success, length and tool calls 0.
    """
    missed = len(failed_without_rows)
    first = first_rows(rows)
    _, owner = np.unique(rows.non_tensor_batch["traj_uid"].astype(str), return_inverse=True)
    per_trajectory = np.bincount(owner, weights=scores.astype(np.float64)) / np.bincount(owner)
    columns = rows.non_tensor_batch
    sources = np.append(columns["data_source"][first].astype(str), [source for _, source in failed_without_rows])
    rewards = _with_zeros(per_trajectory[owner[first]], missed)
    calls = _with_zeros(columns["tool_callings"][first], missed)
    metrics: dict[str, float] = {}
    for source in sorted(set(sources)):
        mine = sources == source
        metrics[f"val/{source}/test_score"] = float(rewards[mine].mean())
        for name, reduce in (("mean", np.mean), ("max", np.max), ("min", np.min)):
            metrics[f"val/{source}/tool_call_count/{name}"] = float(reduce(calls[mine]))
    for key in success_keys(rows):
        values = _with_zeros(columns[key][first], missed)
        metrics[f"val/{key}"] = float(values.mean())
        if key == "success_rate" and len(values) > 1:
            metrics["val/success_rate_stderr"] = float(values.std(ddof=1) / np.sqrt(len(values)))
    metrics["val/episodes"] = float(len(first) + missed)
    metrics["val/episode_length"] = float(_with_zeros(columns["episode_lengths"][first], missed).mean())
    if "prompt_overflow" in columns:
        metrics["val/prompt_overflow"] = float(columns["prompt_overflow"][first].sum() + missed)
    for key in ("is_action_valid", "is_action_admissible"):
        if key in columns:
            metrics[f"val/{key.removeprefix('is_')}_ratio"] = float(columns[key].astype(np.float64).mean())
    return metrics


def success_by_task(rows: DataProto, failed_without_rows: Sequence[tuple[str, str]] = ()) -> dict[str, float]:
    """Success of every task, by the task's own name: what a paired comparison of two evaluations needs.

    A task that was played several times has the mean.
    """
    names = rows.non_tensor_batch.get("task_id", rows.non_tensor_batch["traj_uid"])
    played: dict[str, list[float]] = {}
    for i in first_rows(rows):
        played.setdefault(str(names[i]), []).append(float(rows.non_tensor_batch["success_rate"][i]))
    for task, _ in failed_without_rows:
        played.setdefault(task, []).append(0.0)
    return {task: float(np.mean(values)) for task, values in played.items()}


def _with_zeros(values: np.ndarray, count: int) -> np.ndarray:
    """``values`` as float64 and ``count`` zeros after them."""
    return np.append(values.astype(np.float64), np.zeros(count))


def choose_samples(samples: list[Sample], count: int) -> list[Sample]:
    """The samples logged under ``val/generations``: sorted by prompt, shuffled with a fixed seed, first ``count``."""
    ordered = sorted(samples, key=lambda sample: sample.prompt)
    np.random.RandomState(42).shuffle(ordered)  # type: ignore[arg-type]
    return ordered[:count]


def _first_validation(run_dir: str) -> Mapping[str, Any] | None:
    """The first line of a run's metrics file that has a success rate."""
    lines, _ = read_lines(Path(run_dir).expanduser() / FILE_NAME)
    return next((line for line in lines if line.get(SUCCESS) is not None), None)


def _with_error(metrics: Mapping[str, Any]) -> str:
    """The success rate, with its standard error where there is one."""
    error = metrics.get(f"{SUCCESS}_stderr")
    return f"{metrics[SUCCESS]:.3f}" + ("" if error is None else f" ± {error:.3f}")


def closing_line(
    step: int,
    trained: int,
    after: Mapping[str, float],
    run_dir: str,
    kept: str = "",
) -> str:
    """The last line of a run: how far it got, success before and after, where the figures are.

    Args:
        step: the step it ends at.
        trained: steps that this process trained.
        after: metrics of this process's last validation; empty where it made none after the first step.
        run_dir: the run folder, whose metrics file has the first validation of the run, by whichever process.
        kept: what the checkpoints have of it; nothing is said of them where it is empty.
    """
    parts = [f"finished at step {step}"]
    first = _first_validation(run_dir) if trained else None
    if SUCCESS in after and first is not None and first["step"] < step:
        parts.append(f"{SUCCESS} was {_with_error(first)} at step {first['step']} and is {_with_error(after)} now")
    elif SUCCESS in after:
        parts.append(f"{SUCCESS} is {_with_error(after)}")
    elif not trained:
        parts.append("nothing was left to do (trainer.total_epochs sets the number of steps)")
    if kept:
        parts.append(kept)
    return "; ".join([*parts, f"every figure is in {run_dir}/metrics.jsonl"])
