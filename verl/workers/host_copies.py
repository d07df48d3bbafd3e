"""Parameters and optimiser state whose place between uses is host memory.

Host buffers are made once and kept. On CUDA they are page-locked, so that copies run at the speed of the bus and beside
the host's own work. A model that was only read needs no copy back: its tensors on the device are dropped and those on
the host, which never went away, take their place.

Tensors stay whole in every respect but where their shard is: the same ``Parameter`` objects (the optimiser knows them
by identity), names, placements, and on the host readable as anywhere, which is how weights reach a rollout engine.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from verl.utils.fsdp_utils import reshard

logger = logging.getLogger(__name__)


class HostBuffers:
    """Host memory for copies of tensors, by key: made at a key's first copy and used again for all later ones.

    Page-locked if ``device`` is CUDA. torch takes page-locked memory in powers of two, up to twice a tensor's size. If
    the system gives none, a warning says so once and the memory is ordinary.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._buffers: dict[Hashable, torch.Tensor] = {}

    def __getitem__(self, key: Hashable) -> torch.Tensor:
        return self._buffers[key]

    def __contains__(self, key: Hashable) -> bool:
        return key in self._buffers

    def fill(self, key: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a plain tensor into the buffer, which is returned; see :func:`synchronize`."""
        host = self._buffers.get(key)
        if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
            host = self._buffers[key] = self._allocate(tensor)
        return host.copy_(tensor, non_blocking=True)

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        if self._pinned:
            try:
                return torch.empty_like(like, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self._pinned = False
                _warn_pageable(str(error).partition("\n")[0])
        return torch.empty_like(like, device="cpu")


class OffloadedParameters:
    """The parameters of a module, in host memory from construction on; buffers stay where they are.

    Args:
        module: FSDP2 or plain. Parameters that are elsewhere than on ``device``, where FSDP2's own offloading keeps
            them, are left alone.
        device: where the module computes.

    A shard with fewer rows than FSDP2's padding is copied once more on the host, into ordinary memory that FSDP2 pads.
    Nothing may write to parameters while they are stored.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._hosts = HostBuffers(device)
        reshard(module)
        self._parameters = [p for p in module.parameters() if p.device.type == device.type]
        self.store(changed=True)

    @torch.no_grad()
    def load(self) -> None:
        """Put copies on the device; work that is queued there after this call sees them complete."""
        self._place([_device_copy(self._hosts[p], self._device) for p in self._parameters])

    @torch.no_grad()
    def store(self, changed: bool) -> None:
        """Free the device of them, and drop gradients.

        Args:
            changed: copy their values to the host; else the values there, from before :meth:`load`, are right.
        """
        reshard(self._module)
        if changed:
            for parameter in self._parameters:
                self._hosts.fill(parameter, _local(parameter))
            synchronize(self._device)
        self._place([self._hosts[p] for p in self._parameters])

    def _place(self, shards: list[torch.Tensor]) -> None:
        """Make ``shards`` the parameters' own. FSDP2 takes note of them in ``_apply``, as it does for ``Module.to``."""
        placed = {p: _with_local(p, shard) for p, shard in zip(self._parameters, shards, strict=True)}
        for parameter in self._parameters:
            parameter.grad = None
        self._module._apply(lambda tensor: placed.get(tensor, tensor))


class OffloadedOptimizer:
    """The state tensors of an optimiser, in host memory from construction on.

    Step counters stay where they are, and so does what is elsewhere than on ``device``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        self._hosts = HostBuffers(device)
        self.store()

    @torch.no_grad()
    def load(self) -> None:
        """Put copies on the device; work that is queued there after this call sees them complete."""
        for parameter, state, name, tensor in self._tensors():
            if (parameter, name) in self._hosts:
                state[name] = _with_local(tensor, _device_copy(_local(tensor), self._device))

    @torch.no_grad()
    def store(self) -> None:
        """Copy the tensors to the host, those included that a step or a checkpoint has made, and free the device."""
        for parameter, state, name, tensor in self._tensors():
            if tensor.device.type == self._device.type:
                state[name] = _with_local(tensor, self._hosts.fill((parameter, name), _local(tensor)))
        synchronize(self._device)

    def _tensors(self) -> Iterator[tuple[nn.Parameter, dict[str, Any], str, torch.Tensor]]:
        """All but the counters: the parameter, the dictionary and the name in it, the tensor."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter, {})
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and name != "step":
                        yield parameter, state, name, value


def synchronize(device: torch.device) -> None:
    """Wait for what is queued on the device: copies to the host may be read then."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_copy(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(host, device=device).copy_(host, non_blocking=True)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _with_local(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Distributed as ``tensor`` is, with ``local`` as this rank's part. ``from_local`` would move it to the mesh's."""
    return DTensor(local, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else local


@functools.cache
def _warn_pageable(reason: str) -> None:
    logger.warning(
        "no page-locked host memory for offloaded tensors (%s): they take ordinary memory, from which copies are "
        "several times slower. Free memory of the host, or set param_offload=false and optimizer_offload=false in "
        "fsdp_config",
        reason,
    )
