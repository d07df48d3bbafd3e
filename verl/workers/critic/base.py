"""What the worker asks of a critic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from verl.protocol import DataProto


class BasePPOCritic(ABC):
    """Computes values of rows and learns them."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def compute_values(self, data: DataProto) -> torch.Tensor:
        """Values before each response token, float32 ``(N, R)``, in row order, 0 where there is no token."""

    @abstractmethod
    def update_critic(self, data: DataProto) -> dict[str, float]:
        """Take the optimiser steps the rows ask for; returns metrics reduced over all ranks."""
