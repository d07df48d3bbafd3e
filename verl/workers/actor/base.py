"""What the worker asks of an actor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from verl.protocol import DataProto


class BasePPOActor(ABC):
    """Computes log-probabilities of rows and updates a policy on them."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def compute_log_prob(self, data: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
        """``(log_probs, entropys)``, each float32 ``(N, R)``, in the order of the rows, 0 where there is no token."""

    @abstractmethod
    def update_policy(self, data: DataProto) -> dict[str, float]:
        """Take the optimiser steps the rows ask for; returns metrics reduced over all ranks."""
