"""How the rollout loop reaches the engines: a client whose calls each replica runs in the order of their submission."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import ray

from verl.workers.rollout.base import RolloutRequest, RolloutResult


@runtime_checkable
class GenerationClient(Protocol):
    """Engines by replica number.

    A reference from ``submit`` resolves to the results that finished in that slice. A replica runs its calls one after
    the other, as they were submitted; the next may be submitted while one runs.
    """

    num_replicas: int

    def begin(self) -> dict[str, float]:
        """Makes every engine ready with the present weights; returns metrics."""
        ...

    def end(self) -> dict[str, float]:
        """The rollout is over: engines may give their memory back; returns metrics."""
        ...

    def submit(self, replica: int, requests: Sequence[RolloutRequest], max_steps: int) -> ray.ObjectRef: ...

    def receive(self, call: ray.ObjectRef) -> list[RolloutResult]:
        """The results of a call of ``submit`` that is ready; raises what went wrong in the engine."""
        ...

    def check(self) -> None:
        """Raises what went wrong in ranks whose replies nobody waits for."""
        ...


class WorkerGroupClient:
    """The engines in the ranks of a worker group. All ranks of a replica get every call; its rank 0 answers."""

    def __init__(self, worker_group: Any) -> None:
        self._worker_group = worker_group
        ranks: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for rank, (replica, tp_rank) in enumerate(worker_group.rollout_layout()):
            ranks[replica].append((tp_rank, rank))
        self._ranks = [[rank for _, rank in sorted(ranks[replica])] for replica in sorted(ranks)]
        self._followers: list[ray.ObjectRef] = []
        self.num_replicas = len(self._ranks)

    def ranks_of(self, replica: int) -> list[int]:
        """The ranks of a replica; the first one answers."""
        return self._ranks[replica]

    def begin(self) -> dict[str, float]:
        return _worst(self._worker_group.begin_rollout())

    def end(self) -> dict[str, float]:
        self.check()
        self._followers = []
        return _worst(self._worker_group.end_rollout())

    def submit(self, replica: int, requests: Sequence[RolloutRequest], max_steps: int) -> ray.ObjectRef:
        refs = self._worker_group.execute_ranks_async(self._ranks[replica], "rollout_step", list(requests), max_steps)
        self.check()
        self._followers.extend(refs[1:])
        return refs[0]

    def receive(self, call: ray.ObjectRef) -> list[RolloutResult]:
        return self._worker_group.get(call, method="rollout_step")

    def check(self) -> None:
        if self._followers:
            ready, self._followers = ray.wait(self._followers, num_returns=len(self._followers), timeout=0)
            self._worker_group.get(ready, method="rollout_step")


def as_generation_client(source: Any) -> GenerationClient:
    """``source`` itself if it is a client, else a client over the worker group that it is."""
    return source if isinstance(source, GenerationClient) else WorkerGroupClient(source)


def _worst(reports: Any) -> dict[str, float]:
    """One report of all ranks, the worst of each entry: the least free memory, else the largest value."""
    merged: dict[str, float] = {}
    for report in reports or ():
        for key, value in (report or {}).items():
            worse = min if key.rsplit("/", 1)[-1] == "free" else max
            merged[key] = worse(merged.get(key, value), value)
    return merged
