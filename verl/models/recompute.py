"""What an update does where the activations of its micro-batches do not fit the memory of a GPU.

Recomputing every layer in the backward pass costs a third of its time and of the forward's, and a micro-batch that fits
without is a common case on large GPUs. So only as many decoder layers are recomputed as memory asks for, and before any
is, micro-batches that are filled by tokens become smaller.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig

from verl.utils.fsdp_utils import (
    compute_dtype,
    decoder_layers,
    gathered_bytes,
    reduce_every_time,
    unreduced_bytes,
)

logger = logging.getLogger(__name__)

# Shares of the free memory that activations may take, by the estimate of their size and once it was measured, and what
# the output head and temporaries need beside them.
_SHARE, _SHARE_MEASURED = 0.85, 0.95
_RESERVE_BYTES = 8 << 30

# Micro-batches are not made smaller than this: a GPU would wait for its host longer than recomputing takes.
LEAST_TOKENS = 8192

# Activations of micro-batches with fewer tokens are not measured.
_TELLING_TOKENS = 2048


def activation_bytes_per_token(model: nn.Module) -> float:
    """Bytes one token leaves behind in one decoder layer without checkpointing (an upper estimate).

    Counted: norms and residuals (12 hidden-sized tensors), queries, keys, values and rotations, the attention's
    output, and four tensors of the gated MLP. Measured on a Qwen2.5-1.5B shape in bf16: 107 kB, estimated 115 kB.
    Compiled layers keep about three quarters of it.
    """
    config = model.config.get_text_config()
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = head_dim * (3 * heads + 3 * kv_heads)
    return float(compute_dtype(model).itemsize * (12 * config.hidden_size + attention + _mlp_numbers(config)))


def _mlp_numbers(config: PretrainedConfig) -> int:
    """Numbers a token leaves behind in an MLP; with experts, also the input and output of each that it goes to."""
    hidden = config.hidden_size
    width = getattr(config, "intermediate_size", None) or 4 * hidden  # families that do not name it have this size
    experts = getattr(config, "num_experts_per_tok", None) or 0
    expert_width = getattr(config, "moe_intermediate_size", None) or width
    return max(4 * width, experts * (4 * expert_width + 2 * hidden))


def activation_budget(free_bytes: float, measured: bool = False) -> float:
    """Bytes that activations may take out of ``free_bytes``; more if their size was ``measured``, not estimated."""
    return max(0.0, (_SHARE_MEASURED if measured else _SHARE) * free_bytes - _RESERVE_BYTES)


def layers_to_recompute(num_layers: int, bytes_per_layer: float, free_bytes: float, measured: bool = False) -> int:
    """How many of ``num_layers`` must be recomputed so that the activations of the others fit."""
    fitting = int(activation_budget(free_bytes, measured) / max(bytes_per_layer, 1.0))
    return num_layers - min(num_layers, fitting)


def must_reduce_at_once(
    unreduced: float, num_layers: int, bytes_per_layer: float, free_bytes: float, measured: bool = False
) -> bool:
    """Whether ``unreduced`` bytes of full gradients leave too little memory for what they save.

    That is, less than the head needs, or so little that more than a tenth of the layers would be recomputed for them: a
    recomputed layer costs a third of its time, reductions in every micro-batch some tenth of an update's.
    """
    if unreduced <= 0:
        return False
    more = layers_to_recompute(num_layers, bytes_per_layer, free_bytes - unreduced, measured)
    more -= layers_to_recompute(num_layers, bytes_per_layer, free_bytes, measured)
    return free_bytes - unreduced < _RESERVE_BYTES or more > num_layers // 10


def optimizer_bytes_to_come(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Bytes of a device that this rank's first step of Adam will allocate for good: two moments of each parameter that
    is there, and not in host memory, where FSDP offloads to; 0 after it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if not optimizer.state.get(p)]
    return 2 * sum(_local_bytes(p) for p in parameters if p.device.type == device.type)


def gradient_bytes(model: nn.Module, device: torch.device) -> int:
    """Bytes of a device that this rank's gradients take: as many as its shards of what is trained there."""
    return sum(_local_bytes(p) for p in model.parameters() if p.requires_grad and p.device.type == device.type)


def _local_bytes(parameter: torch.Tensor) -> int:
    return parameter.to_local().nbytes if hasattr(parameter, "to_local") else parameter.nbytes


def free_bytes(device: torch.device) -> int | None:
    """Memory of a GPU that this process can still take, what torch keeps cached included; None on a CPU, whose memory
    is not the limit that counts."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def allocated_bytes(device: torch.device) -> int:
    """Memory of a GPU that tensors of this process take; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


class ActivationMemory:
    """Fits the micro-batches of a model's updates into the memory there is. No effect on a CPU.

    How many bytes a token leaves behind is estimated from the model's shape for the first update, and measured in its
    forward passes for all that follow: compiled layers keep less than others, a head with many answer tokens more.

    Args:
        model: decoder layers that were built with gradient checkpointing may be recomputed, others never are.
        optimizer: room is left for the state that its first step allocates; None for one that keeps none.
        device: where the model computes. None: where its parameters are, which must not be offloaded then.

    Attributes:
        bytes_per_token: what a token leaves behind in a layer, as measured; None before.
        adjustable: layers whose checkpointing ``fit`` switches.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, device: torch.device | None = None
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device or next(model.parameters()).device
        self.bytes_per_token: float | None = None
        self._layers = decoder_layers(model)
        self.adjustable = [m for m in self._layers if getattr(m, "gradient_checkpointing", False)]
        self._planned_tokens = 0
        self._logged = -1

    def tokens_that_fit(self, limit: int) -> int:
        """``limit``, or fewer where no layer could keep its activations otherwise; at least ``LEAST_TOKENS`` of it.

        Collective. Call it with gradients and gathered parameters out of memory, as ``fit``.
        """
        free = self._free()
        if free is None:
            return limit
        budget = activation_budget(free - unreduced_bytes(self.model), self.bytes_per_token is not None)
        fitting = int(budget / (len(self._layers) * self._bytes_per_token()))
        agreed = torch.tensor(max(fitting, LEAST_TOKENS), device=self.device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        return min(limit, int(agreed))

    def fit(self, tokens: int) -> int:
        """Switch checkpointing on for the first layers only, as many as a micro-batch of ``tokens`` needs. Collective.

        Call it with gradients and gathered parameters out of memory. Gradients that were to be reduced once a step, in
        full size until then, are reduced in every micro-batch from then on if memory is too small for them. On CPU
        every layer stays as the config has it.

        Args:
            tokens: of the largest micro-batch on this rank.

        Returns:
            the number of recomputed layers, the same on all ranks.
        """
        self._planned_tokens = tokens
        free = self._free()
        if free is None:
            return self.recomputed
        measured = self.bytes_per_token is not None
        unreduced = unreduced_bytes(self.model)
        layer_bytes = tokens * self._bytes_per_token()
        tight = must_reduce_at_once(unreduced, len(self._layers), layer_bytes, free, measured)
        free -= 0 if tight else unreduced
        count = layers_to_recompute(len(self._layers), layer_bytes, free, measured)
        agreed = torch.tensor([count, tight], device=self.device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        count, tight = agreed.tolist()
        if tight:
            reduce_every_time(self.model)
            logger.info("gradients are reduced in every micro-batch: in full size they would leave too little memory")
        for index, layer in enumerate(self.adjustable):
            layer.gradient_checkpointing = index < count
        self._log(self.recomputed, tokens)
        return self.recomputed

    @property
    def recomputed(self) -> int:
        """How many layers are recomputed."""
        return sum(bool(getattr(layer, "gradient_checkpointing", False)) for layer in self._layers)

    @contextlib.contextmanager
    def measured(self, tokens: int, gathers: bool) -> Iterator[None]:
        """Measure what the forward pass inside the block leaves behind, if its micro-batch is not a small one.

        In a small one, a filler for instance, what does not depend on the number of tokens would be a large part.

        Args:
            tokens: of the micro-batch.
            gathers: the pass gathers weights that stay gathered; what they take is not counted.
        """
        before = allocated_bytes(self.device)
        yield
        kept = len(self._layers) - self.recomputed
        taken = allocated_bytes(self.device) - before - (gathered_bytes(self.model) if gathers else 0)
        width = compute_dtype(self.model).itemsize * self.model.config.get_text_config().hidden_size
        inputs = width * tokens * self.recomputed
        if taken <= inputs or kept == 0 or tokens < max(_TELLING_TOKENS, self._planned_tokens / 2):
            return
        self.bytes_per_token = max(self.bytes_per_token or 0.0, (taken - inputs) / (kept * tokens))

    def _free(self) -> float | None:
        free = free_bytes(self.device)
        if free is None:
            return None
        free -= gradient_bytes(self.model, self.device) + gathered_bytes(self.model)
        return free - (optimizer_bytes_to_come(self.optimizer, self.device) if self.optimizer is not None else 0)

    def _bytes_per_token(self) -> float:
        return self.bytes_per_token or activation_bytes_per_token(self.model)

    def _log(self, count: int, tokens: int) -> None:
        """Say what came out where it is not what was said last."""
        if count != self._logged:
            self._logged = count
            logger.info("%d of %d layers are recomputed for %d tokens at a time", count, len(self._layers), tokens)
