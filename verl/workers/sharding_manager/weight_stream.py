"""The trainer's parameters as a stream of full tensors under their Hugging Face names.

Parameters are gathered from their shards in buckets (`weight_buckets`), cast and handed on one by one, so a rank holds
two buckets beside its shard and never the model. Adapters are merged on the way: the engine sees `W + scale * B @ A`
and knows nothing of LoRA. All ranks iterate in lockstep, because gathering is a collective. Everything that can be
wrong is found by `plan_weights`; the iterator itself does arithmetic and collectives only.

Left out: adapters that are more than a sum of two factors (DoRA, trained biases), which `plan_weights` refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from verl.workers.sharding_manager.weight_buckets import BUCKET_BYTES, BucketedGather, Source

# What wrappers add to a parameter's path.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.", "base_model.model.")


@dataclass(frozen=True)
class LowRankUpdate:
    """One adapter: the weight gains `scale * b @ a`, or its transpose for layers that keep (in, out)."""

    a: torch.Tensor  # (rank, in)
    b: torch.Tensor  # (out, rank)
    scale: float
    transposed: bool


@dataclass(frozen=True)
class PlannedWeight:
    """A weight to send: its name in the checkpoint, the trainer's parameter, adapters to add."""

    name: str
    parameter: torch.Tensor
    updates: tuple[LowRankUpdate, ...] = ()


def plan_weights(module: nn.Module) -> list[PlannedWeight]:
    """What `stream_weights` will send, in model order; tied weights appear under each of their names.

    FSDP2 modules are resharded first. Raises ValueError for adapters that cannot be merged.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    adapted = {name: part for name, part in module.named_modules() if _is_adapted(part)}
    plan = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if any(piece in name for piece in (".lora_A.", ".lora_B.", ".original_module.")):
            continue
        owner, _, leaf = name.rpartition(".base_layer.")
        updates = _updates_of(owner, adapted[owner]) if leaf == "weight" and owner in adapted else ()
        plan.append(PlannedWeight(_checkpoint_name(name), parameter, updates))
    names = [weight.name for weight in plan]
    assert len(set(names)) == len(names), "two parameters share a checkpoint name"
    return plan


def stream_weights(
    plan: list[PlannedWeight], dtype: torch.dtype, device: torch.device | str, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over (name, full tensor of `dtype` on `device`). All ranks must consume the stream to its end.

    Shards are cast before they are gathered, which halves what travels when the trainer keeps float32; those that an
    adapter is added to travel as they are. A tensor does not change while the receiver holds it, but it may share
    memory with the trainer's parameter, or with a bucket of `bucket_bytes` that lives as long: the receiver copies
    what it wants, does not write, and lets go before it takes the next.
    """
    return _merged(plan, BucketedGather([_sources(weight, dtype) for weight in plan], device, bucket_bytes), dtype)


def _sources(weight: PlannedWeight, dtype: torch.dtype) -> list[Source]:
    """The weight, then A and B of each adapter."""
    if not weight.updates:
        return [Source(weight.parameter, dtype)]
    factors = [factor for update in weight.updates for factor in (update.a, update.b)]
    return [Source(tensor, tensor.dtype) for tensor in (weight.parameter, *factors)]


@torch.no_grad()
def _merged(
    plan: list[PlannedWeight], gathered: BucketedGather, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    for weight, tensors in zip(plan, gathered):
        if not weight.updates:
            yield weight.name, tensors[0]
            continue
        full = tensors[0].to(torch.float32, copy=True)
        for update, a, b in zip(weight.updates, tensors[1::2], tensors[2::2]):
            delta = (b.float() @ a.float()).mul_(update.scale)
            full += delta.T if update.transposed else delta
        yield weight.name, full.to(dtype)


def _checkpoint_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    head, separator, tail = name.partition(".modules_to_save.")
    if separator:  # tail is "<adapter>.<leaf>"
        name = f"{head}.{tail.partition('.')[2]}"
    return name.replace(".base_layer.", ".")


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def _updates_of(name: str, module: nn.Module) -> tuple[LowRankUpdate, ...]:
    key = "actor_rollout_ref.model.target_modules"
    if len(getattr(module, "lora_magnitude_vector", ())):
        raise ValueError(
            f"{key}: the adapter of {name} scales weights by magnitude (DoRA), which cannot be merged here"
        )
    if any(module.lora_B[adapter].bias is not None for adapter in module.lora_B):
        raise ValueError(f"{key}: the adapter of {name} trains a bias; use LoRA without biases")
    if len(getattr(module, "lora_embedding_A", ())):
        raise ValueError(f"{key}: the adapter of {name} is on an embedding; target linear layers only")
    return tuple(
        LowRankUpdate(
            a=module.lora_A[adapter].weight,
            b=module.lora_B[adapter].weight,
            scale=float(module.scaling[adapter]),
            transposed=bool(getattr(module, "fan_in_fan_out", False)),
        )
        for adapter in module.active_adapters
        if adapter in module.lora_A
    )
