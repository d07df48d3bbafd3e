"""Mean, variance and whitening over the positions that a mask keeps. Values at other positions never matter."""

from __future__ import annotations

import torch

EPSILON = 1e-8


def masked_sum(values: torch.Tensor, mask: torch.Tensor, dim: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """Sum of `values` where `mask` is set; non-finite values elsewhere do not leak in."""
    kept = torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))
    return kept.sum() if dim is None else kept.sum(dim=dim)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, dim: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """Mean of `values` where `mask` is set; 0 where it is set nowhere."""
    count = mask.sum() if dim is None else mask.sum(dim=dim)
    return masked_sum(values, mask, dim) / (count + EPSILON)


def masked_var(values: torch.Tensor, mask: torch.Tensor, unbiased: bool = True) -> torch.Tensor:
    """Variance over the valid positions, 0-dim.

    Raises:
        ValueError: the mask is empty, or keeps one position where the unbiased variance needs two.
    """
    count = mask.sum()
    if count == 0:
        raise ValueError("variance over no valid position: the mask is all 0")
    centred = values - masked_mean(values, mask)
    variance = masked_mean(centred.square(), mask)
    if not unbiased:
        return variance
    if count == 1:
        raise ValueError("unbiased variance over a single valid position is not defined")
    return variance * (count / (count - 1))


def masked_whiten(values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
    """`values` scaled to variance 1 over the valid positions, and to mean 0 unless `shift_mean` is false.

    All positions are transformed, valid or not. Raises `ValueError` like `masked_var`.
    """
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + EPSILON)
    return whitened if shift_mean else whitened + mean
