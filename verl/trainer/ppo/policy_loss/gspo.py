"""GSPO: one importance ratio per row, shared by its tokens (arXiv 2507.18071, its token form)."""

from __future__ import annotations

import torch

from verl.trainer.ppo.aggregation import PolicyLossOutput, metric_sum
from verl.trainer.ppo.policy_loss.registry import PolicyLossConfig, clip_range, log_ratio, register_policy_loss
from verl.utils.torch_functional import masked_sum

# verl-agent's bound of the row's log-ratio, which keeps exp finite.
MAX_LOG_RATIO = 10.0


def gspo_terms(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLossOutput:
    """GSPO loss per token.

    s = exp(mean over the row's tokens of log_prob - old_log_prob); every token carries the value s and its own gradient
    (s * log_prob / sg(log_prob) in log space), clipped as in PPO. Rows weigh alike: `seq-mean-token-mean` always.

    Args: tensors (rows, response_length); clip distances, usually of the order 3e-4.
    """
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    lengths = response_mask.sum(dim=-1).clamp(min=1)
    sequence_log_r = masked_sum(log_r, response_mask, axis=-1) / lengths  # (rows,)
    token_log_r = log_r - log_r.detach() + sequence_log_r.detach().unsqueeze(-1)  # value of s, gradient of the token
    ratio = torch.exp(torch.clamp(token_log_r, max=MAX_LOG_RATIO))
    plain = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return PolicyLossOutput(
        loss=torch.maximum(plain, clipped),
        metrics={
            "actor/pg_clipfrac": metric_sum(clipped > plain, response_mask),
            "actor/ppo_kl": metric_sum(-log_r, response_mask),
            "actor/pg_clipfrac_lower": metric_sum(torch.zeros_like(log_r), response_mask),
        },
        agg_mode_override="seq-mean-token-mean",
    )


@register_policy_loss("gspo")
def gspo_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: PolicyLossConfig,
) -> PolicyLossOutput:
    """`gspo_terms` with the actor's clip settings."""
    low, high = clip_range(config)
    return gspo_terms(old_log_prob, log_prob, advantages, response_mask, low, high)
