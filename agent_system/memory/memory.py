"""Memories that keep every step and show the most recent ones as text."""

from __future__ import annotations

from typing import Any

from agent_system.memory.base import BaseMemory


class _StepMemory(BaseMemory):
    """Keeps all steps; subclasses say how one step reads and what stands between two."""

    separator = "\n"

    def __init__(self) -> None:
        self._steps: list[list[dict[str, Any]]] = []
        self._keys: frozenset[str] | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: int) -> list[dict[str, Any]]:
        return self._steps[index]

    def reset(self, batch_size: int) -> None:
        self._steps = [[] for _ in range(batch_size)]
        self._keys = None

    def store(self, record: dict[str, list[Any]]) -> None:
        """Adds one step to every environment.

        Args:
            record: ``{key: one value per environment}``; the keys must be those of the first call after ``reset``.

        Raises:
            ValueError: other keys than before, or a list whose length is not the batch size.
        """
        keys = frozenset(record)
        if self._keys is not None and keys != self._keys:
            raise ValueError(f"memory holds the keys {sorted(self._keys)}, this step brings {sorted(keys)}")
        for key, values in record.items():
            if len(values) != len(self._steps):
                raise ValueError(f"memory of {len(self._steps)} environments got {len(values)} values for '{key}'")
        self._keys = keys
        for index, steps in enumerate(self._steps):
            steps.append({key: values[index] for key, values in record.items()})

    def fetch(
        self, history_length: int, obs_key: str = "text_obs", action_key: str = "action"
    ) -> tuple[list[str], list[int]]:
        """Renders the last ``history_length`` steps of every environment.

        Steps are numbered from 1 at the start of the episode. A ``history_length`` of 0 renders every step, so a
        caller that wants no history does not call.

        Returns:
            The texts and the number of steps in each, both of length ``len(self)``.
        """
        texts: list[str] = []
        counts: list[int] = []
        for steps in self._steps:
            recent = steps[-history_length:] if history_length else steps
            first = len(steps) - len(recent) + 1
            lines = [self._render(first + k, step[obs_key], step[action_key]) for k, step in enumerate(recent)]
            texts.append(self.separator.join(lines))
            counts.append(len(recent))
        return texts, counts

    def _render(self, number: int, observation: Any, action: Any) -> str:
        raise NotImplementedError


class SimpleMemory(_StepMemory):
    """Each step is one bracketed line: what was seen, then what was done."""

    def _render(self, number: int, observation: Any, action: Any) -> str:
        return f"[Observation {number}: '{observation}', Action {number}: '{action}']"


class SearchMemory(_StepMemory):
    """Each step is the action followed by what it brought, a blank line between two steps."""

    def _render(self, number: int, observation: Any, action: Any) -> str:
        return f"Step {number}:{action} {observation}\n"
