"""A rank's device: choosing it, offloading to host memory around phases, reading memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import psutil
import torch
from torch import nn

from verl.utils.fsdp_utils import move_optimizer, move_parameters


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


class OffloadedState:
    """A model and its optimiser that live in host memory between uses, as the config asks. No effect on CPU.

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
        on_cuda = device.type == "cuda"
        self.module = module
        self.optimizer = optimizer
        self.device = device
        self.params = params and on_cuda
        self.optimizer_state = optimizer_state and on_cuda and optimizer is not None
        self._store()

    @contextlib.contextmanager
    def loaded(self, with_optimizer: bool = False) -> Iterator[None]:
        """The device holds the parameters, and the optimiser state if asked, inside the block; see growing_segments."""
        with growing_segments(self.device):
            if self.params:
                move_parameters(self.module, self.device)
            if self.optimizer_state and with_optimizer:
                move_optimizer(self.optimizer, self.device)
            try:
                yield
            finally:
                self._store()

    def _store(self) -> None:
        if self.params:
            move_parameters(self.module, "cpu")
        if self.optimizer_state:
            move_optimizer(self.optimizer, "cpu")
        if self.params or self.optimizer_state:
            torch.cuda.empty_cache()


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Peaks of this rank's GPU memory (0 on CPU) and the host's memory in use, GiB, as ``perf/*``."""
    on_cuda = device.type == "cuda"
    return {
        "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated(device) / 2**30 if on_cuda else 0.0,
        "perf/max_memory_reserved_gb": torch.cuda.max_memory_reserved(device) / 2**30 if on_cuda else 0.0,
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used / 2**30,
    }
