"""The random state of a process: as one picklable dict, and kept across code that draws from it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def get_rng_state() -> dict[str, Any]:
    """States of torch (host and, if this process uses one, its GPU), numpy and ``random``."""
    state: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "random": random.getstate(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what ``get_rng_state`` took; a GPU state is ignored where there is no GPU."""
    torch.set_rng_state(state["cpu"])
    np.random.set_state(state["numpy"])
    random.setstate(state["random"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the generators at the end of the block."""
    state = get_rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
