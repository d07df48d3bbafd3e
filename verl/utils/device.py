"""Which accelerator this process has."""

from __future__ import annotations

from types import ModuleType

import torch

__all__ = [
    "get_device_id",
    "get_device_name",
    "get_dist_backend",
    "get_nccl_backend",
    "get_torch_device",
    "is_cuda_available",
    "is_npu_available",
]


def _npu_available() -> bool:
    module = getattr(torch, "npu", None)
    return module is not None and module.is_available()


is_cuda_available: bool = torch.cuda.is_available()
is_npu_available: bool = _npu_available()


def get_device_name() -> str:
    """``"cuda"``, ``"npu"`` or ``"cpu"``."""
    return "cuda" if is_cuda_available else "npu" if is_npu_available else "cpu"


def get_torch_device() -> ModuleType:
    """The module of torch for this device: ``torch.cuda``, ``torch.npu`` or ``torch.cpu``."""
    return getattr(torch, get_device_name())


def get_device_id() -> int:
    """The number of the current device; 0 on CPU."""
    return 0 if get_device_name() == "cpu" else get_torch_device().current_device()


def get_nccl_backend() -> str:
    """The collective backend of the accelerator; ``RuntimeError`` without one."""
    if is_cuda_available:
        return "nccl"
    if is_npu_available:
        return "hccl"
    raise RuntimeError("there is no accelerator here; use the backend 'gloo' (see get_dist_backend)")


def get_dist_backend() -> str:
    """The collective backend of this machine: that of the accelerator, or ``"gloo"``."""
    return "gloo" if get_device_name() == "cpu" else get_nccl_backend()
