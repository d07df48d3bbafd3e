"""Clip-Cov and KL-Cov: hold back the few tokens that drive the entropy down (arXiv 2505.22617).

Both rank tokens by c = (log_prob - mean log_prob)(A - mean A). The means and the number of chosen tokens are those of
the tensors at hand, that is, of one micro-batch: unlike every other loss here, their result depends a little on how a
mini-batch is cut. The number of chosen tokens is share * tokens rounded at random, so its expectation does not.
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
from verl.utils.torch_functional import masked_sum


def token_covariance(log_prob: torch.Tensor, advantages: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """(log_prob - mean)(A - mean) per token, means over valid tokens, detached. (rows, response_length)"""
    log_prob, advantages = log_prob.detach(), advantages.detach()
    tokens = response_mask.sum().clamp(min=1)
    centred_log_prob = log_prob - masked_sum(log_prob, response_mask) / tokens
    return centred_log_prob * (advantages - masked_sum(advantages, response_mask) / tokens)


def rounded_at_random(expected: float) -> int:
    """An integer next to `expected` with that expectation; an integer stays itself."""
    return int(expected + torch.rand(()).item())


@register_policy_loss("clip_cov")
def clip_cov_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: PolicyLossConfig,
) -> PolicyLossOutput:
    """PPO clip, with a random choice of high-covariance tokens left out of the gradient.

    Of the valid tokens with `clip_cov_lb` < c < `clip_cov_ub`, `clip_cov_ratio` (a share of *all* valid tokens) get
    loss 0. Tensors (rows, response_length).
    """
    low, high = clip_range(config)
    options = config.policy_loss
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    ratio = ratio_of(log_r)
    plain = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1.0 - low, 1.0 + high)

    covariance = token_covariance(log_prob, advantages, response_mask)
    eligible = (covariance > options.clip_cov_lb) & (covariance < options.clip_cov_ub) & response_mask.bool()
    candidates = eligible.flatten().nonzero().squeeze(-1)
    wanted = rounded_at_random(options.clip_cov_ratio * float(response_mask.sum()))
    chosen = candidates[torch.randperm(candidates.numel(), device=candidates.device)[:wanted]]
    keep = torch.ones_like(covariance).flatten().index_fill(0, chosen, 0.0).view_as(covariance)
    return PolicyLossOutput(
        loss=torch.maximum(plain, clipped) * keep,
        metrics={
            "actor/pg_clipfrac": metric_sum(keep == 0, response_mask),
            "actor/ppo_kl": metric_sum(-log_r, response_mask),
            "actor/pg_clipfrac_lower": metric_sum(torch.zeros_like(covariance), response_mask),
        },
    )


@register_policy_loss("kl_cov")
def kl_cov_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: PolicyLossConfig,
) -> PolicyLossOutput:
    """-A r per token, plus `ppo_kl_coef` * |log_prob - old_log_prob| on the tokens of highest covariance.

    Those are the top share `kl_cov_ratio` of all valid tokens. Tensors (rows, response_length).
    """
    options = config.policy_loss
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    covariance = token_covariance(log_prob, advantages, response_mask)
    ranked = torch.where(response_mask.bool(), covariance, torch.full_like(covariance, -torch.inf)).flatten()
    tokens = int(response_mask.sum())
    wanted = min(rounded_at_random(options.kl_cov_ratio * tokens), tokens)
    chosen = torch.topk(ranked, wanted).indices
    penalised = torch.zeros_like(ranked).index_fill(0, chosen, 1.0).view_as(covariance)
    return PolicyLossOutput(
        loss=-advantages * ratio_of(log_r) + options.ppo_kl_coef * penalised * log_r.abs(),
        metrics={
            "actor/pg_clipfrac": metric_sum(penalised, response_mask),
            "actor/ppo_kl": metric_sum(-log_r, response_mask),
            "actor/pg_clipfrac_lower": metric_sum(torch.zeros_like(covariance), response_mask),
        },
    )
