"""FSDP2: device meshes, sharding, weights onto shards, gradient clipping.

Both strategy names of the config, ``fsdp`` and ``fsdp2``, mean ``fully_shard`` per decoder layer here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from verl.utils.compiled_layers import compile_layer

logger = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32, "fp32": torch.float32, "32": torch.float32, "float": torch.float32,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float16": torch.float16, "fp16": torch.float16, "half": torch.float16, "16": torch.float16,
}  # fmt: skip


# Parameters below which a model is one unit for FSDP (``whole_below``). A unit costs the host about half a
# millisecond in each micro-batch, as much as a GPU computes for a layer of a small model. Whole gradients take 2 bytes
# a parameter until the backward pass is over and, while they are reduced, 8 more: under 3 GiB for this size.
SMALL_MODEL = 1 << 28
# Share of a GPU's memory that the gathered weights of a model may take for as long as it computes (``gathered_below``).
_GATHERED_SHARE = 0.04


def to_torch_dtype(name: str | torch.dtype) -> torch.dtype:
    """``"bf16"``, ``"bfloat16"``, ``"fp32"`` … as a torch dtype."""
    if isinstance(name, torch.dtype):
        return name
    try:
        return _DTYPES[str(name).lower()]
    except KeyError:
        raise ValueError(f"unknown dtype {name!r}: use one of {sorted(_DTYPES)} for fsdp_config.model_dtype") from None


def ensure_process_group(device: str, timeout_s: float = 1800.0) -> None:
    """Start the default process group if there is none.

    Under torchrun or Ray (``RANK`` and ``WORLD_SIZE`` set) it joins the others; alone it makes a group of one. CUDA
    runs get gloo beside NCCL, because checkpoints and object collectives work on host memory.
    """
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def create_device_mesh(world_size: int, fsdp_size: int, device: str) -> DeviceMesh:
    """``("fsdp",)`` over all ranks, or ``("ddp", "fsdp")`` when ``0 < fsdp_size < world_size`` (HSDP).

    HSDP shards within ``fsdp_size`` neighbouring ranks and replicates across such groups.
    """
    if fsdp_size <= 0 or fsdp_size >= world_size:
        return init_device_mesh(device, (world_size,), mesh_dim_names=("fsdp",))
    if world_size % fsdp_size:
        raise ValueError(f"fsdp_config.fsdp_size={fsdp_size} does not divide the {world_size} ranks")
    return init_device_mesh(device, (world_size // fsdp_size, fsdp_size), mesh_dim_names=("ddp", "fsdp"))


@dataclass(frozen=True)
class ShardingOptions:
    """How a model is sharded. ``None`` dtypes leave a precision as it is.

    ``cpu_offload`` keeps parameters, gradients and optimiser state in host memory between uses (CUDA only).
    A model of fewer than ``whole_below`` parameters is one unit, gathered and reduced whole. One of fewer than
    ``gathered_below`` stays gathered after a forward, whatever ``reshard_after_forward`` says, and gets
    ``reduce_once``: gradients stay in full size until the last micro-batch before a step and are reduced over ranks
    then. They are added up in ``reduce_dtype``; one narrower than the parameters is reduced every time instead.
    ``shard_model`` decides ``reduce_once``, whatever it is given.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    compile_layers: bool = False
    whole_below: int = 0
    gathered_below: int = 0
    reduce_once: bool = False


def parameters_to_keep_gathered(device: str, dtype: torch.dtype) -> int:
    """``gathered_below`` for a device: parameters of which so few fit its memory easily when gathered; 0 on CPU.

    Gathering every unit and freeing it again, forward and backward, is a large part of what FSDP costs the host, for
    which a GPU waits on micro-batches of a few thousand tokens. Weights do not change between two optimiser steps, nor
    between the micro-batches of log-probabilities: kept, they are gathered once. Gradients of such a model are reduced
    once before a step instead of in every micro-batch, for which they take another two to four bytes a parameter, see
    ``unreduced_bytes`` of ``verl.utils.fsdp_memory``. 3 B in bf16 on a GPU of 150 GB.
    """
    if device != "cuda":
        return 0
    return int(_GATHERED_SHARE * torch.cuda.mem_get_info()[1]) // dtype.itemsize


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The dtype a model computes in, which may be narrower than that of its parameters."""
    options = getattr(model, "sharding_options", None)
    return (options.param_dtype if options is not None else None) or next(model.parameters()).dtype


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a transformers model, in order.

    Found by class name through ``_no_split_modules``, sharded or not: any decoder family works. Raises ValueError for
    a model without.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]
    if not layers:
        raise ValueError(f"{type(model).__name__} names no decoder layer to shard; choose another model.path")
    return layers


def shard_model(model: nn.Module, mesh: DeviceMesh, options: ShardingOptions) -> nn.Module:
    """Apply ``fully_shard`` to every decoder layer, unless the model is small, and to the root, in place."""
    precision = MixedPrecisionPolicy(param_dtype=options.param_dtype, reduce_dtype=options.reduce_dtype)
    offload = CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy()
    count = count_parameters(model)
    whole = count < options.whole_below
    kept = count < options.gathered_below and not options.cpu_offload
    dtype = next(model.parameters()).dtype
    exact = (options.reduce_dtype or options.param_dtype or dtype).itemsize >= dtype.itemsize
    once = kept or dist.get_world_size() == 1  # a shard of a single rank has full size anyway
    options = replace(
        options,
        reshard_after_forward=options.reshard_after_forward and not kept,
        reduce_once=once and exact and not options.cpu_offload,
    )
    for layer in decoder_layers(model):
        if options.compile_layers:
            compile_layer(layer)
        if whole:
            continue
        fully_shard(
            layer,
            mesh=mesh,
            mp_policy=precision,
            offload_policy=offload,
            reshard_after_forward=options.reshard_after_forward,
        )
    # The root (embeddings, final norm, output head) is needed first and last: it stays gathered over the backward.
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=False)
    # What is one unit is not resharded after its forward either: the backward begins with it.
    model.sharding_options = replace(options, reshard_after_forward=options.reshard_after_forward and not whole)
    return model


def begin_micro_batch(model: nn.Module, last: bool) -> None:
    """Tell a sharded model whether more micro-batches follow before the optimiser's step; call it before the forward.

    Weights do not change in between, so with ``reshard_after_forward=False``, where they all fit at once anyway,
    they are gathered once for all micro-batches. With ``reduce_once`` gradients are added up where they are and handed
    over after the last. A model that is not sharded by ``shard_model`` is left alone.

    Args:
        last: the same on all ranks.
    """
    options = getattr(model, "sharding_options", None)
    if options is None:
        return
    if not options.reshard_after_forward:
        model.set_reshard_after_backward(last)
    if options.reduce_once:
        model.set_requires_gradient_sync(last)


def reduce_gradients_once(model: nn.Module, once: bool) -> None:
    """Choose, for a model that ``shard_model`` gave ``reduce_once``, between that and every micro-batch; between steps.
    """
    model.sharding_options = replace(model.sharding_options, reduce_once=once)
    model.set_requires_gradient_sync(True)  # begin_micro_batch says otherwise


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give a model with parameters on the meta device real, uninitialised storage; buffers keep their values."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        assert not buffers[name].is_meta, f"buffer {name} has no value to keep"
        buffer.copy_(buffers[name])


@torch.no_grad()
def scatter_weights(model: nn.Module, source: dict[str, torch.Tensor] | None, device: torch.device) -> None:
    """Fill the shards of ``model`` from the full tensors that rank 0 holds, one parameter at a time.

    Args:
        source: name → full tensor on rank 0 (any device and dtype), None on other ranks. Must name every parameter.
        device: the device collectives run on.
    """
    assert (source is None) == (dist.get_rank() != 0), "rank 0 holds the weights"
    for name, param in model.named_parameters():
        if source is None:
            full = torch.empty(param.shape, dtype=param.dtype, device=device)
        else:
            full = source[name].detach().to(device).to(param.dtype)  # in one call the host would do the cast
        if isinstance(param, DTensor):
            shard = distribute_tensor(full, param.device_mesh, param.placements)
            param.to_local().copy_(shard.to_local())
        else:
            dist.broadcast(full, src=0)
            param.copy_(full)


@torch.no_grad()
def copy_shards(model: nn.Module, source: nn.Module) -> None:
    """Fill the shards of ``model`` from a model with the same parameters, sharded over the same ranks alike."""
    theirs = dict(source.named_parameters())
    for name, param in model.named_parameters():
        mine, other = (p.to_local() if isinstance(p, DTensor) else p for p in (param, theirs[name]))
        mine.copy_(other)


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Clip to a global L2 norm, over all ranks; returns the norm before clipping as a plain scalar tensor.

    ``max_norm <= 0`` measures without clipping.
    """
    with_grad = [p for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in with_grad], norm_type=2.0)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm > 0:
        nn.utils.clip_grads_with_norm_(with_grad, max_norm, norm)
    return norm


def count_parameters(model: nn.Module) -> int:
    """Number of distinct parameters of the full model (sharded tensors count at full size)."""
    return sum(p.numel() for p in model.parameters())


def reshard(model: nn.Module) -> None:
    """Free gathered parameters. A forward without a backward leaves the root's gathered, in compute dtype."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
