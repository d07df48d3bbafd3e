"""Lets a manager that only knows whole-batch ``reset``/``step`` be driven episode by episode.

Outputs are gathered until every episode that still runs has one, then the manager steps once. Episodes that are over
get an empty text, and what the manager says of them is ignored. A new attempt of a group waits until all
episodes are over, because only a reset of everything can give it a new task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from agent_system.environments import contract
from agent_system.environments.base import EnvironmentManagerBase, EventEnvironments, Observation
from verl.trainer.config.failure import noted


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
        call = f"{type(self.manager).__name__}.reset"
        with noted(f"in {call}"):
            reply = self.manager.reset(kwargs=self._kwargs)
        obs, infos = contract.parts_of(call, reply, "observations", "infos")
        count = len(contract.texts_of(call, obs))
        if count < self.num_episodes:
            raise ValueError(
                f"{call} gives {count} text observations for {self.num_episodes} episodes: data.train_batch_size × "
                "env.rollout.n (validation: data.val_batch_size) must be the number of its episodes"
            )
        self._capacity = count
        self._running, self._waiting = self._waiting, set()
        return self._observations(call, obs, infos)

    def _step(self) -> list[tuple[int, Observation]]:
        texts = [self._outputs.get(slot, "") for slot in range(self._capacity)]
        self._outputs = {}
        call = f"{type(self.manager).__name__}.step"
        with noted(f"in {call}"):
            reply = self.manager.step(texts)
        obs, rewards, dones, infos = contract.parts_of(call, reply, "observations", "rewards", "dones", "infos")
        return self._observations(call, obs, infos, contract.flat(rewards), contract.flat(dones))

    def _observations(
        self, call: str, obs: Any, infos: Any, rewards: Any = None, dones: Any = None
    ) -> list[tuple[int, Observation]]:
        """What the running episodes show; after a reset there are neither rewards nor dones."""
        count = self._capacity
        texts = contract.one_each(call, 'observations["text"]', contract.texts_of(call, obs), count)
        anchors = texts if obs.get("anchor") is None else obs["anchor"]
        contract.one_each(call, 'observations["anchor"]', anchors, count)
        contract.one_each(call, "infos", infos, count)
        rewards = [0.0] * count if rewards is None else contract.one_each(call, "rewards", rewards, count)
        dones = [False] * count if dones is None else contract.one_each(call, "dones", dones, count)
        found = []
        for slot in sorted(self._running):
            seen = Observation(texts[slot], anchors[slot], rewards[slot], dones[slot], infos[slot])
            contract.check_observation(call, slot, seen)
            seen.info = dict(seen.info)  # managers may go on with the same dict
            found.append((slot, seen))
        return found


def as_event_environments(envs: Any, num_episodes: int, group_size: int, capacity: int) -> EventEnvironments:
    """``envs`` itself if it is event-driven, else an adapter around it (arguments as there)."""
    return envs if isinstance(envs, EventEnvironments) else LockStepAdapter(envs, num_episodes, group_size, capacity)
