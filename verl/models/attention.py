"""Causal attention over packed rows, registered with transformers under the name ``packed``.

On CUDA one variable-length flash kernel serves all rows (``torch.nn.attention.varlen``). Elsewhere, or in float32, each
row goes through ``scaled_dot_product_attention`` by itself. Neither builds a T x T mask, and no row sees another.

A model called without ``cu_seq_lens_q`` (``model(input_ids)``) gets plain causal attention per batch entry; right
padding is harmless there, left padding is not supported.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

logger = logging.getLogger(__name__)

PACKED_ATTENTION = "packed"

try:
    from torch.nn.attention.varlen import varlen_attn

    _VARLEN_PARAMETERS = frozenset(inspect.signature(varlen_attn).parameters)
except ImportError:  # torch before 2.10
    varlen_attn = None
    _VARLEN_PARAMETERS = frozenset()


def register_packed_attention() -> str:
    """Make ``attn_implementation="packed"`` known to transformers; returns that name. Safe to call again."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    return PACKED_ATTENTION


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # (batch, heads, T, head_dim)
    key: torch.Tensor,  # (batch, kv_heads, T, head_dim)
    value: torch.Tensor,  # (batch, kv_heads, T, head_dim)
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    row_bound: torch.Tensor | None = None,  # (at least the longest row, 0)
    row_lengths: tuple[int, ...] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function in the shape transformers asks for; returns ``((batch, T, heads, head_dim), None)``."""
    if dropout:
        raise ValueError("packed attention has no dropout; set attention_dropout=0 in model.override_config")
    if cu_seq_lens_q is None:
        return _row_attention(query, key, value, scaling, sliding_window), None
    assert query.shape[0] == 1, "packed rows form one sequence"
    if row_lengths is None and varlen_attn is not None and query.dtype in (torch.bfloat16, torch.float16):
        return _varlen(query, key, value, cu_seq_lens_q, row_bound, scaling, sliding_window), None
    if row_lengths is None:
        row_lengths = tuple(cu_seq_lens_q.diff().tolist())
    # split + cat, not slices: the backward of a slice fills a tensor of the full length for every row.
    rows = zip(*(x.split(row_lengths, dim=2) for x in (query, key, value)))
    return torch.cat([_row_attention(q, k, v, scaling, sliding_window) for q, k, v in rows], dim=1), None


def _row_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, window: int | None
) -> torch.Tensor:
    """Causal attention of whole batch entries: ``(batch, heads, L, d) -> (batch, L, heads, d)``."""
    length = query.shape[2]
    mask = None
    if window is not None and window < length:
        distance = torch.arange(length, device=query.device)[:, None] - torch.arange(length, device=query.device)
        mask = (distance >= 0) & (distance < window)
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2)


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    row_bound: torch.Tensor | None,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """One flash kernel over all rows: ``(1, heads, T, d) -> (1, T, heads, d)``."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, heads, d)
    options: dict[str, Any] = {}
    if "window_size" in _VARLEN_PARAMETERS:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is None:
        options["is_causal"] = True
    else:
        raise ValueError("sliding-window attention on CUDA needs torch >= 2.11")
    if "scale" in _VARLEN_PARAMETERS:
        options["scale"] = scaling
    elif scaling is not None and abs(scaling - q.shape[-1] ** -0.5) > 1e-9:
        q = q * (scaling * q.shape[-1] ** 0.5)
    if "enable_gqa" in _VARLEN_PARAMETERS:
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    assert row_bound is not None, "packed CUDA inputs carry row_bound"
    max_length = row_bound.shape[0]
    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_length, max_length, **options)[None]
