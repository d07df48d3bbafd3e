"""The contract of an episode memory: a list of step records for each environment of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class BaseMemory(ABC):
    """Stores one record per step and environment, and renders the recent ones for a prompt."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of environments in the batch."""

    @abstractmethod
    def __getitem__(self, index: int) -> list[dict[str, Any]]:
        """All records of environment ``index``, oldest first."""

    @abstractmethod
    def reset(self, batch_size: int) -> None:
        """Forgets everything and makes room for ``batch_size`` environments."""

    @abstractmethod
    def store(self, record: dict[str, list[Any]]) -> None:
        """Adds one step to every environment; each value of ``record`` holds one item per environment."""

    @abstractmethod
    def fetch(self, history_length: int) -> Any:
        """Renders the last ``history_length`` steps of every environment."""
