"""Tensor helpers under the names users know: masked statistics, log-probabilities from logits, padding, schedules.

Training itself never builds logits for whole rows (``verl.models.logprobs``) and never pads; these functions serve
estimators, small scripts and code written against padded batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensordict import TensorDict
from torch import nn

from verl.utils.lr_schedule import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_wsd_schedule_with_warmup,
)

__all__ = [
    "allgather_dict_tensors",
    "broadcast_dict_tensor",
    "clip_by_value",
    "compute_grad_norm",
    "entropy_from_logits",
    "gather_from_labels",
    "get_constant_schedule_with_warmup",
    "get_cosine_schedule_with_warmup",
    "get_response_mask",
    "get_unpad_data",
    "get_wsd_schedule_with_warmup",
    "log_probs_from_logits_response",
    "logprobs_from_logits",
    "logprobs_from_logits_naive",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "pad_2d_list_to_length",
    "pad_sequence_to_length",
    "post_process_logits",
    "postprocess_data",
    "remove_pad_token",
    "split_dict_tensor_into_batches",
    "tokenize_and_postprocess_data",
]

_EPS = 1e-8


# -- masked statistics ------------------------------------------------------------------------------------------------


def masked_sum(values: torch.Tensor, mask: torch.Tensor, axis: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """Sum of ``values`` where ``mask`` is 1; non-finite values under the mask do not leak in."""
    kept = torch.where(mask.bool(), values, torch.zeros_like(values))
    return kept.sum() if axis is None else kept.sum(dim=axis)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, axis: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """``sum(values * mask) / (sum(mask) + 1e-8)``."""
    count = mask.sum() if axis is None else mask.sum(dim=axis)
    return masked_sum(values, mask, axis) / (count + _EPS)


def masked_var(values: torch.Tensor, mask: torch.Tensor, unbiased: bool = True) -> torch.Tensor:
    """Variance of the unmasked values, with Bessel's correction if ``unbiased``.

    Raises:
        ValueError: no unmasked value, or a single one where the correction needs two.
    """
    variance = masked_mean((values - masked_mean(values, mask)).square(), mask)
    if not unbiased:
        return variance
    count = mask.sum()
    if count < 2:
        raise ValueError(f"the unbiased variance needs at least two unmasked values, got {int(count)}")
    return variance * count / (count - 1)


def masked_whiten(values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
    """``(values - mean) / sqrt(var + 1e-8)`` with masked statistics, applied to every position.

    ``shift_mean=False`` adds the mean back.
    """
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + _EPS)
    return whitened if shift_mean else whitened + mean


def clip_by_value(x: torch.Tensor, tensor_min: torch.Tensor, tensor_max: torch.Tensor) -> torch.Tensor:
    """Clamp with tensors as limits."""
    return torch.max(torch.min(x, tensor_max), tensor_min)


# -- logits -----------------------------------------------------------------------------------------------------------


def gather_from_labels(data: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """``(..., V)`` and ``(...)`` labels to the labelled entries ``(...)``."""
    return data.gather(-1, label.unsqueeze(-1)).squeeze(-1)


def logprobs_from_logits_naive(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """``log_softmax(logits)`` at the labels, ``(...)``."""
    return gather_from_labels(F.log_softmax(logits, dim=-1), labels)


def logprobs_from_logits(logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True) -> torch.Tensor:
    """Log-probability of each label in float32: ``logits_y - logsumexp(logits)``.

    Args:
        logits: ``(..., V)``; labels: ``(...)`` int64.
        inplace_backward: accepted and without effect; autograd decides.
    """
    logits = logits.float()
    return gather_from_labels(logits, labels) - torch.logsumexp(logits, dim=-1)


def entropy_from_logits(logits: torch.Tensor) -> torch.Tensor:
    """``logsumexp(logits) - sum(softmax(logits) * logits)`` over the last dimension."""
    return torch.logsumexp(logits, dim=-1) - (F.softmax(logits, dim=-1) * logits).sum(dim=-1)


def log_probs_from_logits_response(
    input_ids: torch.Tensor, logits: torch.Tensor, response_length: int
) -> torch.Tensor:
    """Log-probs of the last ``R = response_length`` tokens: ``(B, L)`` ids, ``(B, L, V)`` logits to ``(B, R)``."""
    return logprobs_from_logits(logits[:, -response_length - 1 : -1], input_ids[:, -response_length:])


def post_process_logits(
    input_ids: torch.Tensor, logits: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> torch.Tensor:
    """Divide by the temperature, in place; ``top_k`` and ``top_p`` filtering belongs to the rollout engine."""
    if temperature != 1.0:
        logits = logits.div_(temperature)
    return logits


# -- masks and padding ------------------------------------------------------------------------------------------------


def get_response_mask(
    response_id: torch.Tensor, eos_token: int | Sequence[int] = 2, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """1 up to and including the first end token of each row, then 0: ``(B, R)``."""
    ends = torch.as_tensor([eos_token] if isinstance(eos_token, int) else list(eos_token), device=response_id.device)
    is_end = torch.isin(response_id, ends).long()
    return (torch.cumsum(is_end, dim=1) - is_end == 0).to(dtype)


def get_unpad_data(attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Flat indices of unmasked tokens, cumulative row lengths ``(B + 1,)`` int32, and the longest row."""
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(attention_mask.flatten(), as_tuple=False).flatten()
    return indices, F.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0)), int(lengths.max())


def pad_2d_list_to_length(
    response: Sequence[Sequence[Any]], pad_token_id: Any, max_length: int | None = None
) -> torch.Tensor:
    """Right-pad lists to the longest, or to ``max_length`` if that is longer: ``(B, L)``."""
    width = max(len(row) for row in response)
    width = width if max_length is None else max(width, max_length)
    return torch.tensor([list(row) + [pad_token_id] * (width - len(row)) for row in response])


def pad_sequence_to_length(
    tensors: torch.Tensor, max_seq_len: int, pad_token_id: Any, left_pad: bool = False
) -> torch.Tensor:
    """Pad the last dimension to ``max_seq_len``; longer tensors stay as they are."""
    missing = max_seq_len - tensors.shape[-1]
    if missing <= 0:
        return tensors
    return F.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def postprocess_data(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad or cut ``(B, L)`` ids and mask to exactly ``max_length``.

    ``truncation``: ``left`` keeps the end, ``right`` the start, ``middle`` the first ``floor(max_length / 2)`` tokens
    and the rest from the end.

    Raises:
        NotImplementedError: a longer row with ``truncation="error"`` or an unknown name.
    """
    assert input_ids.ndim == 2 and input_ids.shape == attention_mask.shape
    length = input_ids.shape[-1]
    if length <= max_length:
        return (
            pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad),
            pad_sequence_to_length(attention_mask, max_length, 0, left_pad),
        )
    head = {"left": 0, "right": max_length, "middle": max_length // 2}.get(truncation)
    if head is None:
        raise NotImplementedError(
            f"{length} tokens do not fit max_length={max_length} with data.truncation={truncation!r}: raise the "
            "length, or use left, right or middle"
        )
    tail_start = length - (max_length - head)
    cut_ids, cut_mask = (
        torch.cat([x[:, :head], x[:, tail_start:]], dim=-1) for x in (input_ids, attention_mask)
    )
    return cut_ids, cut_mask


def tokenize_and_postprocess_data(
    prompt: str, tokenizer: Any, max_length: int, pad_token_id: int, left_pad: bool = True, truncation: str = "error"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokenise one text and ``postprocess_data`` it: two ``(1, max_length)`` tensors."""
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    return postprocess_data(
        encoded["input_ids"], encoded["attention_mask"], max_length, pad_token_id, left_pad, truncation
    )


def remove_pad_token(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> list[list[int]]:
    """The unmasked ids of each row, as lists."""
    return [row[keep.bool()].tolist() for row, keep in zip(input_ids, attention_mask)]


# -- distributed ------------------------------------------------------------------------------------------------------


def compute_grad_norm(model: nn.Module) -> float:
    """Sum of squared local gradient entries (not the root, not over ranks)."""
    return sum(float(p.grad.detach().float().square().sum()) for p in model.parameters() if p.grad is not None)


def broadcast_dict_tensor(tensors: dict[str, torch.Tensor] | TensorDict, src: int, group: Any) -> None:
    """Broadcast every tensor in place, in key order."""
    for key in sorted(tensors.keys()):
        dist.broadcast(tensors[key], src=src, group=group)


def allgather_dict_tensors(
    tensors: dict[str, torch.Tensor] | TensorDict, size: int, group: Any, dim: int = 0
) -> dict[str, torch.Tensor] | TensorDict:
    """Concatenate every tensor over ``size`` ranks along ``dim``; returns the type it was given."""
    gathered: dict[str, torch.Tensor] = {}
    for key in sorted(tensors.keys()):
        parts = [torch.empty_like(tensors[key]) for _ in range(size)]
        dist.all_gather(parts, tensors[key], group=group)
        gathered[key] = torch.cat(parts, dim=dim)
    if isinstance(tensors, TensorDict):
        return TensorDict(gathered, batch_size=tensors.batch_size[0] * size)
    return gathered


def split_dict_tensor_into_batches(tensors: TensorDict, batch_size: int) -> list[TensorDict]:
    """Consecutive parts of ``batch_size`` rows; the rows must divide."""
    assert tensors.batch_size[0] % batch_size == 0, f"{tensors.batch_size[0]} rows do not split into {batch_size}"
    return list(tensors.split(batch_size))
