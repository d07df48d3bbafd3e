"""Advantage estimators, found by name through the registry, and the call that applies one to a batch."""

# The modules of estimators are imported so that these register themselves.
from verl.trainer.ppo.advantage import gae, group_relative, reinforce, step_groups  # noqa: F401
from verl.trainer.ppo.advantage.compute import compute_advantage, compute_response_mask
from verl.trainer.ppo.advantage.registry import (
    AdvantageEstimator,
    AdvantageFn,
    AdvantageInputs,
    adv_estimator_names,
    get_adv_estimator_fn,
    register_adv_est,
)
from verl.trainer.ppo.penalties import apply_invalid_action_penalty, apply_kl_penalty

__all__ = [
    "AdvantageEstimator",
    "AdvantageFn",
    "AdvantageInputs",
    "adv_estimator_names",
    "apply_invalid_action_penalty",
    "apply_kl_penalty",
    "compute_advantage",
    "compute_response_mask",
    "get_adv_estimator_fn",
    "register_adv_est",
]
