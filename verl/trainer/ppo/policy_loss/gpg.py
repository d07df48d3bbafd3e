"""GPG: the plain policy gradient, no ratio, no clip (arXiv 2504.02546)."""

from __future__ import annotations

import torch

from verl.trainer.ppo.aggregation import PolicyLossOutput, metric_sum
from verl.trainer.ppo.policy_loss.registry import PolicyLossConfig, log_ratio, register_policy_loss


@register_policy_loss("gpg")
def gpg_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: PolicyLossConfig,
) -> PolicyLossOutput:
    """-A log_prob per token. `old_log_prob` serves the metric only. Tensors (rows, response_length)."""
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    nothing = torch.zeros_like(log_r)
    return PolicyLossOutput(
        loss=-advantages * log_prob,
        metrics={
            "actor/pg_clipfrac": metric_sum(nothing, response_mask),
            "actor/ppo_kl": metric_sum(-log_r, response_mask),
            "actor/pg_clipfrac_lower": metric_sum(nothing, response_mask),
        },
    )
