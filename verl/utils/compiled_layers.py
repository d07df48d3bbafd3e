"""Decoder layers compiled one by one: a graph for each use of a layer serves all layers and all micro-batches.

Only what differs between micro-batches is a variable of that graph: the number of tokens, of rows, and the bound of
their lengths. With ``torch.compile(dynamic=True)`` every size and number is one, a layer's head dimension and the
epsilon of its norms included. Kernels then divide by the head dimension, and each start of a process takes longer,
because a graph is traced anew even where its kernels are in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter


def compile_layer(layer: nn.Module) -> None:
    """Compile a decoder layer's forward, and backward, when it is first called. Call it before ``fully_shard``."""
    layer.compile()
    layer.register_forward_pre_hook(same_kind_of_input, with_kwargs=True)


class _Unviewed(torch.autograd.Function):
    """The same memory as a tensor that autograd does not know as a view."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.detach()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@torch.compiler.disable
def same_kind_of_input(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of a compiled layer: whatever calls it, one compiled graph fits its inputs.

    Compiled code is checked against whether an input is a view and whether it requires gradients. FSDP makes a view
    of the hidden states in a forward, and none when checkpointing repeats it in the backward: the first recomputed
    layer would compile forward and backward once more. Without gradients, only the first layer's input asks for them
    (gradient checkpointing makes embeddings do so). Runs after FSDP's hook, which is put in front of all others.
    """
    if not args or not isinstance(args[0], torch.Tensor):
        return args, kwargs
    hidden = args[0]
    if not torch.is_grad_enabled():
        hidden = hidden.detach()
    elif hidden._is_view():
        hidden = _Unviewed.apply(hidden)
    args = (hidden, *args[1:])
    for value in tree_iter((args, kwargs)):
        if isinstance(value, torch.Tensor):
            _mark_sizes(value)
    return args, kwargs


def _mark_sizes(value: torch.Tensor) -> None:
    """Tell the compiler which sizes of an input vary: tokens of hidden states and rotations ``(1, T, width)``, and
    all sizes of integers, which are positions ``(1, T)``, borders of rows and the bound of their lengths."""
    if value.is_floating_point():
        varying = [value.dim() - 2] if value.dim() > 1 else []
    else:
        varying = [dim for dim, size in enumerate(value.shape) if size > 1]
    for dim in varying:
        torch._dynamo.maybe_mark_dynamic(value, dim)
