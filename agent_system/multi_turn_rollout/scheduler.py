"""Which replica gets a request, when requests join, and how long a slice is.

An engine step that also prefills costs about twice a pure decode step, so requests join in bunches: what becomes ready
while an engine works waits for the end of its slice. With answers of L tokens, slices of k steps make each request wait
k/2 steps of its L on average, and a join costs c steps of every k: k/(2L) + c/k is least at k = sqrt(2cL). How many
requests run cancels out.

What finished in a slice comes back within milliseconds, as the next prompt of its episode. An engine that has other
requests bridges that time with a short slice that nothing joins; one without waits a moment.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field

import ray

from agent_system.multi_turn_rollout.generation import GenerationClient
from verl.workers.rollout.base import FINISH_ABORT, RolloutRequest, RolloutResult

_SHORTEST_SLICE = 8  # engine steps; below that the call itself costs more than the steps of a small model
JOIN_COST = 2.0  # decode steps: the step that prefills, and the call between two slices
_LONGEST_HOLD_S = 0.05
_HOLD_SHARE = 0.1  # of the last slice's time that an idle engine waits for environments that are about to answer
_BRIDGE_SHARE = 0.3  # of it that an engine with requests goes on before others join
_UNBALANCED = 1.25  # requests leave their group's replica when it has so many times the load of the least loaded one


@dataclass
class _Replica:
    queue: list[RolloutRequest] = field(default_factory=list)
    running: int = 0
    call: ray.ObjectRef | None = None
    submitted_at: float = 0.0
    idle_since: float = 0.0  # the end of its last whole slice
    last_slice_s: float = 0.0
    step_s: float = 0.0  # of an engine step in that slice
    steps: int = 0  # of the call that runs
    bridging: bool = False

    @property
    def load(self) -> int:
        return self.running + len(self.queue)


@dataclass
class EngineCounts:
    """What the engines did in one rollout."""

    slices: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    busy_s: float = 0.0


class ReplicaScheduler:
    """Queues requests for replicas and hands them over slice by slice.

    Args:
        client: the engines.
        max_steps_per_slice: most engine steps of one slice (``actor_rollout_ref.rollout.max_steps_per_slice``).
        call_limit_s: time limit of one slice, seconds (``trainer.step_timeout``).
        join_cost: what a join costs, in decode steps.
    """

    def __init__(
        self,
        client: GenerationClient,
        max_steps_per_slice: int,
        call_limit_s: float,
        join_cost: float = JOIN_COST,
    ) -> None:
        self._client = client
        self._max_steps = max_steps_per_slice
        self._call_limit_s = call_limit_s
        self._join_cost = join_cost
        now = time.perf_counter()
        self._replicas = [_Replica(idle_since=now) for _ in range(client.num_replicas)]
        self._home: dict[int, int] = {}
        self._by_call: dict[ray.ObjectRef, int] = {}
        self._finished = 0
        self.counts = EngineCounts()

    @property
    def calls(self) -> list[ray.ObjectRef]:
        """The outstanding calls, at most one per replica."""
        return list(self._by_call)

    def enqueue(self, group: int, request: RolloutRequest) -> None:
        """Queues a request at the replica of its group, whose prefix cache knows the task."""
        if group not in self._home:
            homes = Counter(self._home.values())
            self._home[group] = min(range(len(self._replicas)), key=lambda number: homes[number])
        self._replicas[self._home[group]].queue.append(request)
        self.counts.requests += 1
        self.counts.prompt_tokens += len(request.prompt_ids)

    def dispatch(self, environments_pending: bool) -> float | None:
        """Starts a slice on every idle replica that has work.

        Args:
            environments_pending: replies are on their way that may bring more requests; a replica gives them a moment,
                so that they join now and not a slice later.

        Returns:
            Seconds until a replica that waits should no longer wait; None if none waits.
        """
        self._balance()
        now = time.perf_counter()
        holds = []
        for number, replica in enumerate(self._replicas):
            if replica.call is not None or replica.load == 0:
                continue
            remaining = self._hold(replica) - (now - replica.idle_since)
            if not environments_pending or remaining <= 0:
                self._submit(number, replica, self.slice_steps())
            elif replica.running and replica.step_s:
                self._submit(number, replica, max(1, int(remaining / 2 / replica.step_s)), bridging=True)
            else:
                holds.append(remaining)
        return min(holds, default=None)

    def collect(self, call: ray.ObjectRef) -> list[RolloutResult]:
        """Results of a call that is ready; an engine's error is raised here."""
        number = self._by_call.pop(call)
        replica = self._replicas[number]
        results = self._client.receive(call)
        replica.call = None
        seconds = time.perf_counter() - replica.submitted_at
        if not replica.bridging:
            replica.idle_since = replica.submitted_at + seconds
            replica.last_slice_s = seconds
            replica.step_s = seconds / replica.steps
        replica.running -= len(results)
        self.counts.busy_s += seconds
        self._finished += len(results)
        for result in results:
            if result.finish_reason == FINISH_ABORT:
                raise RuntimeError(f"replica {number} gave up request {result.request_id}")
            self.counts.generated_tokens += len(result.response_ids)
        return results

    def check(self) -> None:
        """Raises for a call that takes too long, or what went wrong in ranks nobody waits for."""
        self._client.check()
        now = time.perf_counter()
        for number, replica in enumerate(self._replicas):
            if replica.call is not None and now - replica.submitted_at > self._call_limit_s:
                raise TimeoutError(
                    f"rollout replica {number} did not finish a slice of generation within "
                    f"trainer.step_timeout={self._call_limit_s} s ({replica.running} requests running)"
                )

    def slice_steps(self) -> int:
        """Engine steps of the next slice, by the mean response so far: from 8 up to the configured most."""
        if not self._finished:
            return self._max_steps
        mean = self.counts.generated_tokens / self._finished
        return min(self._max_steps, max(_SHORTEST_SLICE, int(math.sqrt(2 * self._join_cost * mean))))

    def _balance(self) -> None:
        """Moves queued requests from crowded replicas to the least loaded one, newest first."""
        while len(self._replicas) > 1:
            least = min(self._replicas, key=lambda replica: replica.load)
            most = max((replica for replica in self._replicas if replica.queue), key=lambda r: r.load, default=least)
            if most.load <= _UNBALANCED * least.load + 4:
                return
            least.queue.append(most.queue.pop())

    def _hold(self, replica: _Replica) -> float:
        """Seconds after a whole slice within which the replica takes no new requests if more are about to come."""
        if replica.last_slice_s == 0.0:
            return _LONGEST_HOLD_S
        share = _BRIDGE_SHARE if replica.running else _HOLD_SHARE
        return min(_LONGEST_HOLD_S, share * replica.last_slice_s)

    def _submit(self, number: int, replica: _Replica, steps: int, bridging: bool = False) -> None:
        requests: list[RolloutRequest] = []
        if not bridging:
            requests, replica.queue = replica.queue, []
        replica.running += len(requests)
        replica.steps, replica.bridging = steps, bridging
        replica.call = self._client.submit(number, requests, steps)
        replica.submitted_at = time.perf_counter()
        self._by_call[replica.call] = number
        self.counts.slices += 1
