"""What the worker asks of a reward model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from verl.protocol import DataProto


class BasePPORewardModel(ABC):
    """Judges rows."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def compute_rm_score(self, data: DataProto) -> torch.Tensor:
        """Scores on the last response token, float32 ``(N, R)``, in row order, 0 everywhere else."""
