"""The trainer's parameters as a stream of full tensors under their Hugging Face names.

One parameter at a time is gathered from its shards, cast and handed on, so a rank never holds more than one full
tensor beside its shard. Adapters are merged on the way: the engine sees `W + scale * B @ A` and knows nothing of
LoRA. All ranks iterate in lockstep, because gathering is a collective. Everything that can be wrong is found by
`plan_weights`; the iterator itself does arithmetic and collectives only.

Left out: adapters that are more than a sum of two factors (DoRA, trained biases), which `plan_weights` refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

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


@torch.no_grad()
def stream_weights(
    plan: list[PlannedWeight], dtype: torch.dtype, device: torch.device | str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full tensor of `dtype` on `device`). All ranks must consume the stream to its end.

    Shards are cast before they are gathered, which halves what travels when the trainer keeps float32. A yielded tensor
    may share memory with the trainer's parameter: the receiver copies and does not write.
    """
    for weight in plan:
        if not weight.updates:
            yield weight.name, gather_full(weight.parameter, dtype, device)
            continue
        full = gather_full(weight.parameter, torch.float32, device).clone()
        for update in weight.updates:
            a = gather_full(update.a, torch.float32, device)
            b = gather_full(update.b, torch.float32, device)
            delta = (b @ a).mul_(update.scale)
            full += delta.T if update.transposed else delta
        yield weight.name, full.to(dtype)


def gather_full(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """The full tensor on every rank of the mesh, cast; shards that lie in host memory pass through `device`."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to(device=device, dtype=dtype)
    local = tensor.detach().to_local().to(device=device, dtype=dtype)
    if tensor.device_mesh.size() == 1:
        return local  # the shard is the whole; spares a third of the time on one GPU
    cast = DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return cast.full_tensor()


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
