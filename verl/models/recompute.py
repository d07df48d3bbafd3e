"""Gradient checkpointing for as many decoder layers as memory asks for, and no more.

Recomputing every layer costs a third of the forward and backward time. A micro-batch that would fit without is a common
case on large GPUs, so layers beyond the memory budget are recomputed and the others keep their activations.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import nn

from verl.utils.fsdp_utils import decoder_layers, gathered_bytes, reduce_every_time, unreduced_bytes

logger = logging.getLogger(__name__)

# Share of the free memory that activations may take, and what the output head and temporaries need beside them.
_SHARE = 0.85
_RESERVE_BYTES = 8 << 30


def activation_bytes_per_token(model: nn.Module) -> float:
    """Bytes one token leaves behind in one decoder layer without checkpointing, in bf16 (an upper estimate).

    Counted: norms and residuals (12 hidden-sized tensors), queries, keys, values and rotations, the attention's
    output, and four tensors of the gated MLP. Measured on a Qwen2.5-1.5B shape: 107 kB, estimated 115 kB.
    """
    config = model.config.get_text_config()
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = head_dim * (3 * heads + 3 * kv_heads)
    return 2.0 * (12 * config.hidden_size + attention + 4 * config.intermediate_size)


def layers_to_recompute(num_layers: int, bytes_per_layer: float, free_bytes: float) -> int:
    """How many of ``num_layers`` must be recomputed so that the activations of the others fit."""
    budget = max(0.0, _SHARE * free_bytes - _RESERVE_BYTES)
    return num_layers - min(num_layers, int(budget / max(bytes_per_layer, 1.0)))


def must_reduce_at_once(unreduced: float, num_layers: int, bytes_per_layer: float, free_bytes: float) -> bool:
    """Whether ``unreduced`` bytes of full gradients leave too little memory for what they save.

    That is, less than the head needs, or so little that more than a tenth of the layers would be recomputed for them: a
    recomputed layer costs a third of its time, reductions in every micro-batch some tenth of an update's.
    """
    if unreduced <= 0:
        return False
    more = layers_to_recompute(num_layers, bytes_per_layer, free_bytes - unreduced)
    more -= layers_to_recompute(num_layers, bytes_per_layer, free_bytes)
    return free_bytes - unreduced < _RESERVE_BYTES or more > num_layers // 10


def optimizer_bytes_to_come(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that this rank's first step of Adam will allocate for good: two moments of each parameter; 0 after it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if not optimizer.state.get(p)]
    return 2 * sum(_local_bytes(p) for p in parameters)


def _local_bytes(parameter: torch.Tensor) -> int:
    return parameter.to_local().nbytes if hasattr(parameter, "to_local") else parameter.nbytes


def fit_recomputation(model: nn.Module, tokens: int, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Switch checkpointing on for the first layers only, as many as a micro-batch of ``tokens`` needs. Collective.

    Call it with gradients and gathered parameters out of memory. Gradients that were to be reduced once a step, in full
    size until then, are reduced in every micro-batch from then on if memory is too small for them. On CPU, where memory
    is not the limit that counts, every layer stays as the config has it.

    Args:
        tokens: of the largest micro-batch on this rank.
        optimizer: room is left for the state that its first step allocates; None for one that keeps none.

    Returns:
        the number of recomputed layers, the same on all ranks.
    """
    layers = [layer for layer in decoder_layers(model) if hasattr(layer, "gradient_checkpointing")]
    device = next(model.parameters()).device
    if device.type != "cuda":
        return sum(layer.gradient_checkpointing for layer in layers)
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free -= sum(map(_local_bytes, model.parameters())) + gathered_bytes(model)  # gradients, weights
    free -= optimizer_bytes_to_come(optimizer) if optimizer is not None else 0
    unreduced = unreduced_bytes(model)
    layer_bytes = tokens * activation_bytes_per_token(model)
    tight = must_reduce_at_once(unreduced, len(layers), layer_bytes, free)
    free -= 0 if tight else unreduced
    count = layers_to_recompute(len(layers), layer_bytes, free)
    agreed = torch.tensor([count, tight], device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    count, tight = agreed.tolist()
    if tight:
        reduce_every_time(model)
        logger.info("gradients are reduced in every micro-batch: in full size they would leave too little memory")
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index < count
    logger.info("%d of %d layers are recomputed for %d tokens at a time", count, len(layers), tokens)
    return count
