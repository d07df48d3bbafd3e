"""The algorithms under the names users know; each lives in its own small file.

In `verl.trainer.ppo`: estimators are in `advantage`, policy losses in `policy_loss`, aggregation in `aggregation`, KL
in `kl`. The functions here that return one number aggregate a batch that is all present; training uses the losses per
token and divides by counts of the whole mini-batch instead (`LossNormalizer`).
"""

from __future__ import annotations

import torch

from verl.trainer.ppo.advantage.gae import compute_gae_advantage_return
from verl.trainer.ppo.advantage.group_relative import (
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_rloo_outcome_advantage,
)
from verl.trainer.ppo.advantage.registry import AdvantageEstimator, get_adv_estimator_fn, register_adv_est
from verl.trainer.ppo.advantage.reinforce import (
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
)
from verl.trainer.ppo.aggregation import LossNormalizer, PolicyLossOutput, agg_loss, aggregate
from verl.trainer.ppo.kl import AdaptiveKLController, FixedKLController, get_kl_controller, kl_penalty
from verl.trainer.ppo.pf_ppo import compute_pf_ppo_reweight_data
from verl.trainer.ppo.policy_loss import dual_clip_terms, get_policy_loss_fn, gspo_terms, register_policy_loss
from verl.trainer.ppo.value_loss import compute_value_loss

__all__ = [
    "AdaptiveKLController",
    "AdvantageEstimator",
    "FixedKLController",
    "LossNormalizer",
    "PolicyLossOutput",
    "agg_loss",
    "aggregate",
    "compute_entropy_loss",
    "compute_gae_advantage_return",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_pf_ppo_reweight_data",
    "compute_policy_loss",
    "compute_policy_loss_gspo",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rewards",
    "compute_rloo_outcome_advantage",
    "compute_value_loss",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_penalty",
    "register_adv_est",
    "register_policy_loss",
]

# (pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower), all 0-dim.
PolicyLossSummary = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def compute_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> PolicyLossSummary:
    """Dual-clip PPO loss of a batch that is all here.

    Args:
        old_log_prob, log_prob, advantages, response_mask: (rows, response_length).
        cliprange: clip distance on a side that has none of its own.
        cliprange_low, cliprange_high: clip distances below and above 1.
        clip_ratio_c: upper bound of the ratio for negative advantages.
        loss_agg_mode: see `agg_loss`.

    Returns:
        loss, share of clipped tokens, mean of old - new log-prob, share of tokens at the dual-clip bound.
    """
    low, high = _clip_sides(cliprange, cliprange_low, cliprange_high)
    output = dual_clip_terms(old_log_prob, log_prob, advantages, response_mask, low, high, clip_ratio_c)
    return _summary(output, response_mask, loss_agg_mode)


def compute_policy_loss_gspo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "seq-mean-token-mean",
) -> PolicyLossSummary:
    """GSPO loss of a batch that is all here; arguments and returns as in `compute_policy_loss`.

    Rows weigh alike whatever `loss_agg_mode` says, and `clip_ratio_c` has no use in it.
    """
    low, high = _clip_sides(cliprange, cliprange_low, cliprange_high)
    output = gspo_terms(old_log_prob, log_prob, advantages, response_mask, low, high)
    return _summary(output, response_mask, loss_agg_mode)


def _clip_sides(both: float | None, low: float | None, high: float | None) -> tuple[float, float]:
    low = both if low is None else low
    high = both if high is None else high
    if low is None or high is None:
        raise ValueError("give cliprange, or both cliprange_low and cliprange_high")
    return low, high


def _summary(output: PolicyLossOutput, response_mask: torch.Tensor, loss_agg_mode: str) -> PolicyLossSummary:
    loss = agg_loss(output.loss, response_mask, output.agg_mode_override or loss_agg_mode)
    clipped, kl, lower = (
        output.metrics[name][0] / output.metrics[name][1].clamp(min=1)
        for name in ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
    )
    return loss, clipped, kl, lower


def compute_entropy_loss(
    logits: torch.Tensor, response_mask: torch.Tensor, loss_agg_mode: str = "token-mean"
) -> torch.Tensor:
    """Aggregated entropy (nats) of logits (rows, response_length, vocabulary)."""
    log_probs = torch.log_softmax(logits, dim=-1)
    return agg_loss(-(log_probs.exp() * log_probs).sum(dim=-1), response_mask, loss_agg_mode)


def compute_rewards(
    token_level_scores: torch.Tensor, old_log_prob: torch.Tensor, ref_log_prob: torch.Tensor, kl_ratio: float
) -> torch.Tensor:
    """token_level_scores - kl_ratio * (old_log_prob - ref_log_prob), all (rows, response_length)."""
    return token_level_scores - kl_ratio * (old_log_prob - ref_log_prob)
