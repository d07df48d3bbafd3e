"""Truncated importance sampling: correct for the gap between the engine that sampled and the trainer that learns.

The engine's log-probabilities differ from the trainer's for the same weights (kernels, dtype). Each token's loss is
multiplied with sg(min(exp(old_log_prob - rollout_log_prob), cap)); `actor.tis_cap` sets the cap (2 is usual); with
null there is no correction.
"""

from __future__ import annotations

import dataclasses

import torch

from verl.trainer.ppo.aggregation import PolicyLossOutput, metric_sum
from verl.trainer.ppo.policy_loss.registry import log_ratio, ratio_of


def apply_truncated_importance_sampling(
    output: PolicyLossOutput,
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor | None,
    response_mask: torch.Tensor,
    cap: float,
) -> PolicyLossOutput:
    """`output` with every token's loss weighted, and the metrics `actor/tis_weight` and `actor/tis_clipfrac` added.

    Args:
        output: a policy loss, not yet aggregated.
        old_log_prob: (rows, response_length) log-probs of the trainer before the update.
        rollout_log_prob: (rows, response_length) log-probs that the engine sampled with.
        response_mask: (rows, response_length).
        cap: upper bound of the weight, > 0.

    Raises:
        ValueError: no rollout log-probs, or a cap that is not positive.
    """
    if rollout_log_prob is None:
        raise ValueError(
            "actor.tis_cap needs rollout_log_probs, and this rollout engine gave none: set actor.tis_cap=null"
        )
    if not cap > 0:
        raise ValueError(f"actor.tis_cap={cap} must be greater than 0 (2.0 is usual; null turns the correction off)")
    weight = ratio_of(log_ratio(old_log_prob, rollout_log_prob, response_mask)).detach()  # (rows, response_length)
    truncated = weight.clamp(max=cap)
    metrics = {
        **output.metrics,
        "actor/tis_weight": metric_sum(truncated, response_mask),
        "actor/tis_clipfrac": metric_sum(weight > cap, response_mask),
    }
    return dataclasses.replace(output, loss=output.loss * truncated, metrics=metrics)
