"""How many episodes of a task there are: what environments make room for, and what a step learns from.

Each is at least 1. A configuration that says less is refused by ``validate``; one that was not validated, here.
"""

from __future__ import annotations

from typing import Any


def group_size(config: Any) -> int:
    """Episodes of a task that a training step learns from: ``env.rollout.n``.

    Raises:
        ValueError: it is no integer, or less than 1.
    """
    return _checked("env.rollout.n", config.env.rollout.n)


def train_group_size(config: Any) -> int:
    """Episodes of a task that are played in training: ``group_size``, and with ReMax a greedy one as its baseline."""
    return group_size(config) + (config.algorithm.adv_estimator == "remax")


def val_group_size(config: Any) -> int:
    """Episodes of a task that are played in validation: ``actor_rollout_ref.rollout.val_kwargs.n``.

    Raises:
        ValueError: it is no integer, or less than 1.
    """
    return _checked("actor_rollout_ref.rollout.val_kwargs.n", config.actor_rollout_ref.rollout.val_kwargs.n)


def _checked(key: str, size: Any) -> int:
    if not isinstance(size, int) or isinstance(size, bool):
        raise ValueError(f"{key} must be an integer, not {size!r}")
    if size < 1:
        raise ValueError(f"{key}={size} has to be at least 1: it is the number of episodes of a task")
    return size
