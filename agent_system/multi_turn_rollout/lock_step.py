"""Lets a manager that only knows whole-batch ``reset``/``step`` be driven episode by episode.

Outputs are gathered until every episode that still runs has one, then the manager steps once. Episodes that are over
get an empty text, and what the manager says of them is ignored. A new attempt of a group waits until all
episodes are over, because only a reset of everything can give it a new task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from agent_system.environments.base import EnvironmentManagerBase, EventEnvironments, Observation


class LockStepAdapter(EventEnvironments):
    """The event-driven face of a lock-step manager.

    Args:
        manager: with ``reset(kwargs)`` and ``step(text_actions)`` as the contract says.
        num_episodes: episodes that play, the first of the manager's.
        group_size: consecutive episodes that share a task.
        capacity: episodes the manager was built for; None: ``num_episodes``. A last validation batch may have fewer
            tasks; the manager still gets an action, and the ``kwargs`` of some task, for every episode it has.

    The manager's calls run in the caller's process; an error in them is not contained and raises.
    """

    def __init__(
        self, manager: EnvironmentManagerBase, num_episodes: int, group_size: int, capacity: int | None = None
    ) -> None:
        self.manager = manager
        self.num_episodes, self.group_size = num_episodes, group_size
        self._capacity = max(num_episodes, capacity or 0)
        self._kwargs: Sequence[Any] | None = None
        self._block = 0
        self._running: set[int] = set()
        self._waiting: set[int] = set()
        self._outputs: dict[int, str] = {}

    def begin(
        self, groups: Sequence[int], kwargs: Sequence[Any] | None = None, attempt: int = 0, block: int = 0
    ) -> list[ray.ObjectRef]:
        self._block = block
        if attempt == 0:
            self._kwargs = self._fill_up(kwargs)
            self._running.clear()
            self._outputs.clear()
        for group in groups:
            self._waiting.update(range(group * self.group_size, (group + 1) * self.group_size))
        return self._advance()

    def submit_steps(self, actions: Sequence[tuple[int, str]]) -> list[ray.ObjectRef]:
        self._outputs.update(actions)
        return self._advance()

    def finish(self, slot: int) -> list[ray.ObjectRef]:
        self._running.discard(slot)
        return self._advance()

    def collect(self, ref: ray.ObjectRef) -> list[tuple[int, Observation]]:
        return ray.get(ref)

    def expire(self, ref: ray.ObjectRef, reason: str) -> list[tuple[int, Observation]]:
        raise AssertionError("replies of a lock-step manager are there at once")

    def restart(self, slot: int) -> list[ray.ObjectRef]:
        raise AssertionError("a lock-step manager does not report failed environments")

    def success_evaluator(self, **kwargs: Any) -> dict[str, np.ndarray]:
        return self.manager.success_evaluator(**kwargs)

    def task_id(self, slot: int) -> str:
        """The task's number over all validation blocks: lock-step managers name no tasks."""
        return str((self._block * self._capacity + slot) // self.group_size)

    def _advance(self) -> list[ray.ObjectRef]:
        if self._running and self._running <= self._outputs.keys():
            return [ray.put(self._step())]
        if not self._running and self._waiting:
            return [ray.put(self._reset())]
        return []

    def _fill_up(self, kwargs: Sequence[Any] | None) -> Sequence[Any] | None:
        if kwargs is None or not 0 < len(kwargs) < self._capacity:
            return kwargs
        return [*kwargs, *(kwargs[-1] for _ in range(self._capacity - len(kwargs)))]

    def _reset(self) -> list[tuple[int, Observation]]:
        obs, infos = self.manager.reset(kwargs=self._kwargs)
        texts = obs["text"]
        if texts is None or len(texts) < self.num_episodes:
            raise ValueError(
                f"the environment gives {0 if texts is None else len(texts)} text observations for "
                f"{self.num_episodes} episodes: data.train_batch_size × env.rollout.n (validation: "
                "data.val_batch_size) must be the number of its episodes"
            )
        self._capacity = len(texts)
        self._running, self._waiting = self._waiting, set()
        anchors = _anchors(obs)
        return [
            (slot, Observation(texts[slot], anchors[slot], info=dict(infos[slot]))) for slot in sorted(self._running)
        ]

    def _step(self) -> list[tuple[int, Observation]]:
        texts = [self._outputs.get(slot, "") for slot in range(self._capacity)]
        self._outputs = {}
        obs, rewards, dones, infos = self.manager.step(texts)
        rewards, dones = np.reshape(rewards, -1), np.reshape(dones, -1)  # some managers give (episodes, 1)
        anchors = _anchors(obs)
        return [
            (
                slot,
                Observation(
                    obs["text"][slot], anchors[slot], float(rewards[slot]), bool(dones[slot]), dict(infos[slot])
                ),
            )
            for slot in sorted(self._running)
        ]


def as_event_environments(envs: Any, num_episodes: int, group_size: int, capacity: int) -> EventEnvironments:
    """``envs`` itself if it is event-driven, else an adapter around it (arguments as there)."""
    return envs if isinstance(envs, EventEnvironments) else LockStepAdapter(envs, num_episodes, group_size, capacity)


def _anchors(obs: dict[str, Any]) -> Sequence[Any]:
    return obs["text"] if obs.get("anchor") is None else obs["anchor"]
