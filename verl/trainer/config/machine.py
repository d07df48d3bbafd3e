"""What the machine has, found without importing torch."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from verl.trainer.config.schema import PPOTrainerConfig


def visible_gpus() -> int:
    """NVIDIA GPUs this process may use: those with a device file, cut down by ``CUDA_VISIBLE_DEVICES``."""
    present = sum(1 for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    return min(present, sum(1 for one in chosen.split(",") if one.strip() not in ("", "-1")))


def cpu_count() -> int:
    """CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resolve_device(config: PPOTrainerConfig) -> PPOTrainerConfig:
    """The configuration with ``trainer.device=auto`` replaced by ``cuda`` where there is a GPU, else by ``cpu``."""
    if config.trainer.device != "auto":
        return config
    device = "cuda" if visible_gpus() else "cpu"
    return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, device=device))
