"""Validation: the same tasks, each once, and what is reported of them."""
from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from verl.protocol import DataProto

logger = logging.getLogger(__name__)


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


def validation_metrics(rows: DataProto) -> dict[str, float]:
    """``val/*`` over trajectories, every task counting once however long its episode was.

    ``val/success_rate_stderr`` is the standard error of the mean over tasks. ``test_score`` is the mean episode reward
    (the reference averages it over rows, so that long episodes weigh more there).
    """
    first = first_rows(rows)
    columns = rows.non_tensor_batch
    sources = columns["data_source"][first].astype(str)
    rewards = columns["episode_rewards"][first].astype(np.float64)
    calls = columns["tool_callings"][first].astype(np.float64)
    metrics: dict[str, float] = {}
    for source in sorted(set(sources)):
        mine = sources == source
        metrics[f"val/{source}/test_score"] = float(rewards[mine].mean())
        for name, reduce in (("mean", np.mean), ("max", np.max), ("min", np.min)):
            metrics[f"val/{source}/tool_call_count/{name}"] = float(reduce(calls[mine]))
    for key in success_keys(rows):
        values = columns[key][first].astype(np.float64)
        metrics[f"val/{key}"] = float(values.mean())
        if key == "success_rate" and len(values) > 1:
            metrics["val/success_rate_stderr"] = float(values.std(ddof=1) / np.sqrt(len(values)))
    metrics["val/episodes"] = float(len(first))
    metrics["val/episode_length"] = float(columns["episode_lengths"][first].astype(np.float64).mean())
    for key in ("is_action_valid", "is_action_admissible"):
        if key in columns:
            metrics[f"val/{key.removeprefix('is_')}_ratio"] = float(columns[key].astype(np.float64).mean())
    return metrics


def success_by_task(rows: DataProto) -> dict[str, float]:
    """Success of every task, by the task's own name: what a paired comparison of two evaluations needs."""
    first = first_rows(rows)
    names = rows.non_tensor_batch.get("task_id", rows.non_tensor_batch["traj_uid"])
    return {str(names[i]): float(rows.non_tensor_batch["success_rate"][i]) for i in first}


def choose_samples(samples: list[Sample], count: int) -> list[Sample]:
    """The samples logged under ``val/generations``: sorted by prompt, shuffled with a fixed seed, first ``count``."""
    ordered = sorted(samples, key=lambda sample: sample.prompt)
    np.random.RandomState(42).shuffle(ordered)  # type: ignore[arg-type]
    return ordered[:count]
