"""Keep the process's random generators as they were across code that draws from them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """States of Python's, NumPy's and torch's global generators."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the generators at the end of the block."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
