"""The critic's loss: squared error with the prediction clipped around its old value (PPO2's value clipping)."""

from __future__ import annotations

import torch

from verl.trainer.ppo.aggregation import MetricSum, agg_loss, metric_sum


def value_loss_per_token(
    vpreds: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange_value: float,
) -> tuple[torch.Tensor, dict[str, MetricSum]]:
    """max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) per token; no factor 1/2.

    Args:
        vpreds, returns, values, response_mask: (rows, response_length); `values` are those before the update.
        cliprange_value: c, in units of the return.

    Returns:
        loss (rows, response_length) to aggregate with a `LossNormalizer`, and metrics as (sum, count) over valid
        tokens.
    """
    clipped_preds = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    plain = (vpreds - returns).square()
    clipped = (clipped_preds - returns).square()
    metrics = {
        "critic/vf_clipfrac": metric_sum(clipped > plain, response_mask),
        "critic/vpred_mean": metric_sum(vpreds, response_mask),
    }
    return torch.maximum(plain, clipped), metrics


def compute_value_loss(
    vpreds: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The aggregated value loss of a batch that is all here, and the share of clipped tokens (both 0-dim)."""
    loss, metrics = value_loss_per_token(vpreds, returns, values, response_mask, cliprange_value)
    clipped, tokens = metrics["critic/vf_clipfrac"]
    return agg_loss(loss, response_mask, loss_agg_mode), clipped / tokens.clamp(min=1)
