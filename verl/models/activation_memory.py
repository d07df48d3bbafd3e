"""Fits the micro-batches of an update into the memory of a GPU.

Recomputing every layer in the backward pass costs a third of its time and of the forward's, and a micro-batch that fits
without is a common case on large GPUs. So only as many decoder layers are recomputed as memory asks for, and where
micro-batches are filled by tokens, smaller ones are weighed against that (``verl.models.memory_plan``).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig

from verl.models.memory_plan import (
    Sizes,
    UpdateMemory,
    cheapest_way,
    costs_by_limit,
    largest_of,
    launch_tokens,
)
from verl.utils.flops_counter import FlopsCounter
from verl.utils.fsdp_memory import gathered_bytes, gathered_root_bytes, reduction_bytes, unreduced_bytes, working_bytes
from verl.utils.fsdp_utils import compute_dtype, decoder_layers, reduce_gradients_once
from verl.utils.model import mlp_width

logger = logging.getLogger(__name__)

# Shares of the free memory that an update may take, with the size of activations estimated and measured.
_SHARE, _SHARE_MEASURED = 0.85, 0.95

# The output head: two chunks of logits in float32, one in the compute dtype, and the gradient of its weights.
_HEAD_BYTES = 4 << 30

# Of the estimate of an eager layer's activations, what compiled layers keep: measured 0.6 to 0.75.
_COMPILED = 0.8

# Activations of micro-batches with fewer tokens are not measured.
_TELLING_TOKENS = 1024


def activation_bytes_per_token(model: nn.Module) -> float:
    """Bytes one token leaves behind in one decoder layer without checkpointing (an upper estimate).

    Counted: norms and residuals (12 hidden-sized tensors), queries, keys, values and rotations, the attention's
    output, and four tensors of the gated MLP. Measured on a Qwen2.5-1.5B shape in bf16: 107 kB, estimated 119 kB.
    Compiled layers keep less.
    """
    config = model.config.get_text_config()
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = head_dim * (3 * heads + 3 * kv_heads)
    options = getattr(model, "sharding_options", None)
    share = _COMPILED if options is not None and options.compile_layers else 1.0
    return share * compute_dtype(model).itemsize * (12 * config.hidden_size + attention + _mlp_numbers(config))


def _mlp_numbers(config: PretrainedConfig) -> int:
    """Numbers a token leaves behind in an MLP; with experts, also the input and output of each that it goes to."""
    experts = getattr(config, "num_experts_per_tok", None) or 0
    dense = getattr(config, "intermediate_size", None) or 0  # some layers of a model with experts may have none
    return max(4 * dense, 4 * mlp_width(config) + experts * 2 * config.hidden_size)


def optimizer_bytes_to_come(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Bytes of a device that this rank's first step of Adam will allocate for good: two moments of each parameter that
    is there, and not in host memory, where FSDP offloads to; 0 after it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if not optimizer.state.get(p)]
    return 2 * sum(_local_bytes(p) for p in parameters if p.device.type == device.type)


def gradient_bytes(model: nn.Module, device: torch.device) -> int:
    """Bytes of a device that this rank's gradients take: as many as its shards of what is trained there.

    A single rank has no smaller shards: with ``reduce_once`` it adds its gradients up in the dtype of reduction.
    """
    options = getattr(model, "sharding_options", None)
    alone = options is not None and options.reduce_once and dist.get_world_size() == 1
    least = options.reduce_dtype.itemsize if alone and options.reduce_dtype is not None else 0
    trained = (p for p in model.parameters() if p.requires_grad and p.device.type == device.type)
    return sum(_local_bytes(p) // p.dtype.itemsize * max(p.dtype.itemsize, least) for p in trained)


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
    """Decides how an update fits into memory: limits of tokens, recomputed layers, gradients. No effect on a CPU.

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
        self._fixed = _HEAD_BYTES + working_bytes(model)
        self._unreduced = max(0, unreduced_bytes(model) - reduction_bytes(model))  # the rest is there either way
        self._root = gathered_root_bytes(model)
        at_work = len(self._layers) * FlopsCounter(model.config).layer_parameters()  # of experts those of a token
        self._launches = launch_tokens(len(self._layers), at_work)
        self._largest = 0
        self._logged: tuple[int, bool] | None = None

    def cheapest_limit(self, limit: int, split: Callable[[int], Sizes]) -> int:
        """The number of tokens, at most ``limit``, to which micro-batches are best filled. Collective.

        Call it with gradients and gathered parameters out of memory, as ``fit``.

        Args:
            split: the micro-batches of this rank, were they filled up to so many tokens.

        Returns:
            the same on all ranks; ``limit`` on a CPU.
        """
        free = self._free()
        if free is None:
            return limit
        limits, costs = costs_by_limit(limit, split, self._memory(), free, self._unreduced, self._launches)
        agreed = torch.tensor(costs, dtype=torch.float64, device=self.device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return limits[int(agreed.argmin())]

    def fit(self, sizes: Sizes) -> int:
        """Switch checkpointing on for the first layers only, as many as the largest micro-batch needs. Collective.

        Call it with gradients and gathered parameters out of memory. Gradients that could be reduced once a step, in
        full size until then, are reduced in every micro-batch of this update if that costs less. On CPU every layer
        stays as the config has it.

        Args:
            sizes: the micro-batches of this rank.

        Returns:
            the number of recomputed layers, the same on all ranks.
        """
        self._largest = largest_of(sizes)
        free = self._free()
        if free is None:
            return self.recomputed
        memory = self._memory()
        _, at_once = cheapest_way(sizes, memory, free, self._unreduced, self._launches)
        agreed = torch.tensor(at_once, dtype=torch.int64, device=self.device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        at_once = bool(agreed)
        if self._unreduced:
            reduce_gradients_once(self.model, not at_once)
        agreed = torch.tensor(
            memory.recomputed(self._largest, free - (0 if at_once else self._unreduced)), device=self.device
        )
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        for index, layer in enumerate(self.adjustable):
            layer.gradient_checkpointing = index < int(agreed)
        self._log(self.recomputed, at_once)
        return self.recomputed

    @property
    def recomputed(self) -> int:
        """How many layers are recomputed."""
        return sum(bool(getattr(layer, "gradient_checkpointing", False)) for layer in self._layers)

    @contextlib.contextmanager
    def measured(self, tokens: int, gathers: bool) -> Iterator[None]:
        """Measure what the forward pass inside the block leaves behind, if its micro-batch is not a small one.

        In a small one, a filler for instance, what else a forward allocates would be a large part.

        Args:
            tokens: of the micro-batch.
            gathers: the pass gathers weights that stay gathered. What they take is not counted, nor are those of the
                root, which every pass gathers otherwise.
        """
        before = allocated_bytes(self.device)
        yield
        kept = len(self._layers) - self.recomputed
        gathered = self._root + (gathered_bytes(self.model) if gathers else 0)
        taken = allocated_bytes(self.device) - before - gathered
        inputs = self._input_bytes() * tokens * self.recomputed
        if taken <= inputs or kept == 0 or tokens < max(_TELLING_TOKENS, self._largest / 2):
            return
        self.bytes_per_token = max(self.bytes_per_token or 0.0, (taken - inputs) / (kept * tokens))

    def _memory(self) -> UpdateMemory:
        return UpdateMemory(
            layers=len(self._layers),
            kept=self.bytes_per_token or activation_bytes_per_token(self.model),
            inputs=self._input_bytes(),
            fixed=self._fixed,
            may_recompute=bool(self.adjustable),
        )

    def _input_bytes(self) -> float:
        """What a token leaves behind in a layer that is recomputed: its hidden state."""
        return float(compute_dtype(self.model).itemsize * self.model.config.get_text_config().hidden_size)

    def _free(self) -> float | None:
        """Bytes that an update may take beside weights, the gradients of this rank, and the optimiser's state."""
        free = free_bytes(self.device)
        if free is None:
            return None
        free -= gradient_bytes(self.model, self.device) + gathered_bytes(self.model)
        free -= optimizer_bytes_to_come(self.optimizer, self.device) if self.optimizer is not None else 0
        return (_SHARE if self.bytes_per_token is None else _SHARE_MEASURED) * free

    def _log(self, count: int, at_once: bool) -> None:
        """Say what came out where it is not what was said last."""
        if (count, at_once) == self._logged:
            return
        self._logged = (count, at_once)
        logger.info("%d of %d layers are recomputed for %d tokens at a time", count, len(self._layers), self._largest)
        if at_once:
            logger.info("gradients are reduced in every micro-batch: in full size they would leave too little memory")
