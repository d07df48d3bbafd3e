"""A rank's device: choosing it and offloading to host memory around phases."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

import torch
from torch import nn

from verl.workers.host_copies import OffloadedOptimizer, OffloadedParameters, synchronize

logger = logging.getLogger(__name__)


def choose_device(device: str) -> torch.device:
    """This process's device; on CUDA the one of its local rank among those it sees.

    Raises:
        ValueError: ``cuda`` without a usable GPU, or an unknown name.
    """
    if device == "cpu":
        return torch.device("cpu")
    if device != "cuda":
        raise ValueError(f"trainer.device={device!r}: use cuda or cpu")
    if not torch.cuda.is_available():
        raise ValueError("trainer.device=cuda, but this process sees no GPU; set trainer.device=cpu (preset=embedded)")
    index = int(os.environ.get("LOCAL_RANK", os.environ.get("RAY_LOCAL_RANK", "0"))) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _set_allocator(settings: str) -> None:
    """Change settings of torch's CUDA allocator, in the notation of ``PYTORCH_CUDA_ALLOC_CONF``."""
    torch._C._accelerator_setAllocatorSettings(settings)


@contextlib.contextmanager
def growing_segments(device: torch.device) -> Iterator[None]:
    """Let torch's CUDA allocator take memory in segments that grow, inside the block; no effect elsewhere.

    Micro-batches differ in size. A tensor of a larger one fits into no segment of a smaller one, so segments of all
    sizes pile up until the device is full, are all handed back, and pile up again. One that grows serves every size.

    Only training gets them: memory that a rollout engine sleeps with, records graphs on or shows to other processes
    has to lie in segments of the other kind. Settings in ``PYTORCH_CUDA_ALLOC_CONF`` or ``PYTORCH_ALLOC_CONF`` stay as
    they are, ``expandable_segments:False`` included.
    """
    if device.type != "cuda" or any(name in os.environ for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")):
        yield
        return
    _set_allocator("expandable_segments:True")
    try:
        yield
    finally:
        _set_allocator("expandable_segments:False")


def shares_device() -> bool:
    """Whether another process may compute on this one's GPU: its worker group was started for a part of one.

    The trainer never does that: all its roles, engine included, live in one process on each GPU.
    """
    return os.environ.get("WG_SHARES_DEVICE") == "1"


def release_cached(device: torch.device) -> None:
    """Hand the blocks that torch keeps cached back to the driver. No effect on CPU.

    To take them again costs time, a call for every 20 MiB where segments grow, so only where somebody outside torch's
    allocator needs the memory: an engine that is about to measure what is free or to wake, another process.
    """
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()


class OffloadedState:
    """A model and its optimiser that live in host memory between uses, as the config asks. No effect on CPU.

    What they leave on the device stays in torch's cache, where the next phase of this process finds it: its models and
    its rollout engine, which makes itself room before it wakes (``HybridEngine``). The cache is emptied after
    construction, before an engine measures what is free, and after every use if the GPU is shared with other processes.

    Args:
        module: FSDP2 model.
        optimizer: None for a model that is not trained.
        params, optimizer_state: what to offload.
        device: where they compute.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        params: bool,
        optimizer_state: bool = False,
    ) -> None:
        apart = _has_own_memory(device)
        self.device = device
        self._parameters = OffloadedParameters(module, device) if params and apart else None
        offloads_optimizer = optimizer_state and apart and optimizer is not None
        self._optimizer = OffloadedOptimizer(optimizer, device) if offloads_optimizer else None
        if self._parameters or self._optimizer:
            release_cached(device)

    @contextlib.contextmanager
    def loaded(self, with_optimizer: bool = False) -> Iterator[None]:
        """The device holds the parameters inside the block; see growing_segments.

        Args:
            with_optimizer: the optimiser's state too, and the block may change both. Otherwise the block only reads:
                nothing is copied back.

        An error in the block is raised as it is, also if FSDP2, in the middle of a forward, does not give up its
        weights; they stay on the device then, which the log says.
        """
        with growing_segments(self.device):
            if self._parameters:
                self._parameters.load()
            if self._optimizer and with_optimizer:
                self._optimizer.load()
            try:
                yield
            except BaseException:
                self._store_after_error(with_optimizer)
                raise
            self._store(with_optimizer)

    def _store_after_error(self, with_optimizer: bool) -> None:
        try:
            self._store(with_optimizer)
        except Exception as error:
            logger.warning("after an error the model could not be moved back to host memory: %r", error)

    def _store(self, with_optimizer: bool) -> None:
        if self._parameters:
            self._parameters.store(changed=with_optimizer)
        if self._optimizer and with_optimizer:
            self._optimizer.store()
        if (self._parameters or self._optimizer) and shares_device():
            release_cached(self.device)


def _has_own_memory(device: torch.device) -> bool:
    return device.type == "cuda"
