"""CISPO: clip the importance weight, not the update (MiniMax-M1, arXiv 2506.13585)."""

from __future__ import annotations

import torch

from verl.trainer.ppo.aggregation import PolicyLossOutput, metric_sum
from verl.trainer.ppo.policy_loss.registry import (
    PolicyLossConfig,
    clip_range,
    log_ratio,
    ratio_of,
    register_policy_loss,
)


@register_policy_loss("cispo")
def cispo_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: PolicyLossConfig,
) -> PolicyLossOutput:
    """-sg(clip(r, 1 - low, 1 + high)) A log_prob per token; no token loses its gradient.

    Tensors (rows, response_length).
    """
    low, high = clip_range(config)
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    ratio = ratio_of(log_r.detach())
    weight = torch.clamp(ratio, 1.0 - low, 1.0 + high)
    return PolicyLossOutput(
        loss=-weight * advantages * log_prob,
        metrics={
            "actor/pg_clipfrac": metric_sum(weight != ratio, response_mask),
            "actor/ppo_kl": metric_sum(-log_r, response_mask),
            "actor/pg_clipfrac_lower": metric_sum(ratio < 1.0 - low, response_mask),
        },
    )
