"""PF-PPO: policy filtration by resampling rows according to their reward (arXiv 2409.06957)."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from verl.protocol import DataProto

# Every row keeps some chance, so that weights of 0 never make a distribution of nothing.
SMALLEST_WEIGHT = 1e-8
MAX_RANDOM_WEIGHTS = (0.4, 0.1)


def pf_ppo_weights(scores: torch.Tensor, reweight_method: str, weight_pow: float) -> torch.Tensor:
    """Sampling weights (rows,) for scores (rows,).

    `pow`: |score|^weight_pow; `max_min`: 1 for the highest and lowest score, else 0; `max_random`: 0.4 for the highest,
    else 0.1.

    Raises:
        ValueError: unknown method.
    """
    if reweight_method == "pow":
        weights = scores.abs().pow(weight_pow)
    elif reweight_method == "max_min":
        weights = ((scores == scores.max()) | (scores == scores.min())).to(scores.dtype)
    elif reweight_method == "max_random":
        high, low = MAX_RANDOM_WEIGHTS
        weights = torch.where(scores == scores.max(), high, low).to(scores.dtype)
    else:
        raise ValueError(
            f"algorithm.pf_ppo.reweight_method={reweight_method!r} is not known: use pow, max_min or max_random"
        )
    return weights + SMALLEST_WEIGHT


def compute_pf_ppo_reweight_data(data: DataProto, reweight_method: str = "pow", weight_pow: float = 2.0) -> DataProto:
    """As many rows, drawn with replacement by their score.

    Filler rows stay where they are, and so does the plan of mini-batches (`mini_batch`): a drawn row takes the place of
    another. The draw is a function of the scores alone, so a resumed run draws the same.

    Args:
        data: rows with `token_level_scores` and `response_mask`, both (rows, response_length).
        reweight_method, weight_pow: see `pf_ppo_weights`.
    """
    mask = data.batch["response_mask"].bool()
    scores = torch.where(mask, data.batch["token_level_scores"], 0.0).sum(dim=-1).float().cpu()
    real = mask.any(dim=-1).cpu().nonzero().squeeze(-1)
    if real.numel() == 0:
        return data
    generator = torch.Generator().manual_seed(zlib.crc32(scores.numpy().tobytes()))
    weights = pf_ppo_weights(scores[real], reweight_method, weight_pow)
    drawn = torch.multinomial(weights, real.numel(), replacement=True, generator=generator)
    source = torch.arange(len(data))
    source[real] = real[drawn]
    resampled = data.select_idxs(source)
    if "mini_batch" in data.batch.keys():
        resampled.batch["mini_batch"] = data.batch["mini_batch"]
    return resampled
