"""Registry of advantage estimators: `algorithm.adv_estimator` names one of them.

An estimator sees the rows of one training step and returns `(advantages, returns)`, both (rows, response_length). To
add one::

    @register_adv_est("mine")
    def my_estimator(inputs):
        advantages = (inputs.scores() - 0.5).unsqueeze(-1) * inputs.response_mask
        return advantages, advantages
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.trainer.config.errors import nearest

if TYPE_CHECKING:
    from verl.protocol import DataProto


class AdvantageEstimator(str, Enum):
    """Names of the shipped estimators."""

    GAE = "gae"
    GRPO = "grpo"
    GRPO_PASSK = "grpo_passk"
    RLOO = "rloo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    GiGPO = "gigpo"
    HGPO = "hgpo"


@dataclass
class AdvantageInputs:
    """What an estimator may look at.

    Attributes:
        token_level_rewards: (rows, response_length) float32, 0 at masked positions.
        response_mask: (rows, response_length), 1 for valid response tokens; a row without any is a filler and must not
            matter.
        index: (rows,) task group of each row (`uid`).
        traj_index: (rows,) trajectory of each row (`traj_uid`).
        step_index: (rows,) int, time of the row within its trajectory; None if the batch has none.
        config: the `algorithm` section of the config.
        data: the whole batch, for an estimator that needs more columns.
        metrics: an estimator may add name -> number here; they are logged.
    """

    token_level_rewards: torch.Tensor
    response_mask: torch.Tensor
    index: np.ndarray
    traj_index: np.ndarray
    step_index: np.ndarray | None
    config: Any
    data: DataProto
    metrics: dict[str, float] = field(default_factory=dict)

    def scores(self) -> torch.Tensor:
        """(rows,) sum of each row's token rewards."""
        return self.token_level_rewards.sum(dim=-1)

    def group_arguments(self) -> dict[str, Any]:
        """What every estimator that compares rows of a group is called with, by name."""
        return {
            "token_level_rewards": self.token_level_rewards,
            "response_mask": self.response_mask,
            "index": self.index,
            "traj_index": self.traj_index,
            "compute_mean_std_cross_steps": self.config.compute_mean_std_cross_steps,
            "step_index": self.step_index,
        }

    def tensor(self, key: str, why: str) -> torch.Tensor:
        """Column `key` of the batch as a tensor.

        Raises:
            ValueError: the batch has no such column; says `why` it should.
        """
        if self.data.batch is not None and key in self.data.batch.keys():
            return self.data.batch[key]
        if key in self.data.non_tensor_batch:
            return torch.as_tensor(self.data.non_tensor_batch[key].astype(np.float32))
        if key == "values":
            why += "; critic.enable=true trains the critic that predicts them"
        raise ValueError(f"algorithm.adv_estimator={self.config.adv_estimator} needs {key!r} in the batch: {why}")

    def array(self, key: str, why: str) -> np.ndarray:
        """Column `key` of the non-tensor batch. Raises `ValueError` like `tensor`."""
        if key not in self.data.non_tensor_batch:
            raise ValueError(f"algorithm.adv_estimator={self.config.adv_estimator} needs {key!r} in the batch: {why}")
        return self.data.non_tensor_batch[key]


AdvantageFn = Callable[[AdvantageInputs], tuple[torch.Tensor, torch.Tensor]]

_ESTIMATORS: dict[str, AdvantageFn] = {}


def register_adv_est(name: str | AdvantageEstimator) -> Callable[[AdvantageFn], AdvantageFn]:
    """Decorator: make an estimator selectable as `algorithm.adv_estimator=<name>`.

    Raises:
        ValueError: another function already has the name.
    """
    key = AdvantageEstimator(name).value if isinstance(name, AdvantageEstimator) else name

    def decorator(fn: AdvantageFn) -> AdvantageFn:
        known = _ESTIMATORS.get(key)
        if known is not None and (known.__module__, known.__qualname__) != (fn.__module__, fn.__qualname__):
            raise ValueError(
                f"advantage estimator {key!r} is already registered by {known.__module__}: choose another name"
            )
        _ESTIMATORS[key] = fn
        return fn

    return decorator


def get_adv_estimator_fn(name: str | AdvantageEstimator) -> AdvantageFn:
    """The estimator called `name`.

    Raises:
        ValueError: no such estimator; lists those there are.
    """
    key = name.value if isinstance(name, AdvantageEstimator) else name
    if key not in _ESTIMATORS:
        meant = nearest(key, _ESTIMATORS)
        raise ValueError(
            f"algorithm.adv_estimator={key!r} is not known; "
            + (f"did you mean {meant}? Else " if meant else "")
            + f"choose one of {', '.join(sorted(_ESTIMATORS))}, "
            "or register your own and name its file in actor_rollout_ref.model.external_lib"
        )
    return _ESTIMATORS[key]


def adv_estimator_names() -> list[str]:
    """Names of all registered estimators, sorted."""
    return sorted(_ESTIMATORS)
