"""PPO's clipped surrogate with separate lower and upper clip and the dual clip for negative advantages.

Sources: PPO (arXiv 1707.06347, eq. 7); dual clip (arXiv 1912.09729); clip-higher (DAPO, arXiv 2503.14476).
"""

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


def dual_clip_terms(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float,
) -> PolicyLossOutput:
    """Dual-clip PPO loss per token.

    With r = exp(log_prob - old_log_prob): max(-A r, -A clip(r, 1 - low, 1 + high)), and for A < 0 at most -A c.

    Args:
        old_log_prob, log_prob, advantages, response_mask: (rows, response_length).
        clip_low, clip_high: distances of the clip borders from 1.
        clip_ratio_c: upper bound of the ratio where the advantage is negative; above 1.

    Raises:
        ValueError: `clip_ratio_c` <= 1.
    """
    if clip_ratio_c <= 1.0:
        raise ValueError(f"actor.clip_ratio_c={clip_ratio_c} must be greater than 1 (3.0 is usual)")
    log_r = log_ratio(log_prob, old_log_prob, response_mask)  # (rows, response_length)
    ratio = ratio_of(log_r)
    plain = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    pessimistic = torch.maximum(plain, clipped)
    bound = -advantages * clip_ratio_c
    loss = torch.where(advantages < 0, torch.minimum(bound, pessimistic), pessimistic)
    hit_bound = (pessimistic > bound) & (advantages < 0)
    return PolicyLossOutput(
        loss=loss,
        metrics={
            "actor/pg_clipfrac": metric_sum(clipped > plain, response_mask),
            "actor/ppo_kl": metric_sum(-log_r, response_mask),
            "actor/pg_clipfrac_lower": metric_sum(hit_bound, response_mask),
        },
    )


@register_policy_loss("vanilla")
def vanilla_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: PolicyLossConfig,
) -> PolicyLossOutput:
    """`dual_clip_terms` with the actor's clip settings."""
    low, high = clip_range(config)
    return dual_clip_terms(old_log_prob, log_prob, advantages, response_mask, low, high, float(config.clip_ratio_c))
