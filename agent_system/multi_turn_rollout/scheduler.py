"""Which replica gets a request, when requests join, and what keeps an engine busy until they do.

An engine step that also prefills costs about twice a pure decode step, so requests join in bunches: what becomes ready
while an engine works waits for the next one. With answers of L tokens, bunches every k steps make each request wait
k/2 steps of its L on average, and a join costs c steps of every k: k/(2L) + c/k is least at k = sqrt(2cL). How many
requests run cancels out.

What finished in a slice comes back within milliseconds, as the next prompt of its episode. So that an engine does not
stand still meanwhile, it has up to two calls, and runs them in their order: behind each whole slice, which a bunch
joins, waits a *bridge*, a short slice that nothing joins::

    engine  |  whole slice      |  bridge  |  whole slice      |  bridge  |
    driver                       results → decode, environments, prompts → the next bunch, behind the bridge

A bridge lasts as long as the next bunch is likely to take, which is learned, and both together k steps. If the bunch
takes longer, another bridge goes behind the first. An engine without requests ends a bridge at once; it waits a moment
for environments before it gets its bunch.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field

import ray

from agent_system.multi_turn_rollout.generation import GenerationClient
from verl.workers.rollout.base import FINISH_ABORT, RolloutRequest, RolloutResult

_MOST_CALLS = 2  # of a replica: the one that runs and the one behind it
_SHORTEST_SLICE = 8  # engine steps from bunch to bunch; below that calls cost more than the steps of a small model
JOIN_COST = 2.0  # decode steps: what a step that prefills costs more, and a call
_LONGEST_HOLD_S = 0.05
_HOLD_SHARE = 0.1  # of the last slice's time that an idle engine waits for environments that are about to answer
_BRIDGE_SHARE = 0.3  # of it that an engine with requests goes on before others join
_ROUND_TRIP_S = 0.005  # a call's results to the driver, and another call to the engine
_LONGEST_GAP_S = 0.1
_FORGET = 0.25  # of what a bridge was too long; what it was too short counts in full, as then the engine stood still
_UNBALANCED = 1.25  # requests leave their group's replica when it has so many times the load of the least loaded one


@dataclass
class _Call:
    ref: ray.ObjectRef
    requests: int  # that join
    steps: int
    bridge: bool
    submitted_at: float


@dataclass
class _Replica:
    queue: list[RolloutRequest] = field(default_factory=list)
    running: int = 0  # requests sent whose results have not come back
    calls: list[_Call] = field(default_factory=list)  # outstanding, in the order in which the engine runs them
    answered_at: float = 0.0  # the end of its last call
    slice_ended_at: float = 0.0  # of its last whole slice
    slice_s: float = 0.0  # the length of that
    bunch_due: bool = False  # it had results, so that others follow
    bridge_steps: int = 0  # of its last bridge
    step_s: float = 0.01  # of an engine step without prompts; the first value is a guess
    gap_s: float = _LONGEST_HOLD_S  # from a whole slice's results until the next bunch is sent; likewise

    @property
    def load(self) -> int:
        return self.running + len(self.queue)

    @property
    def call_began_at(self) -> float:
        """When the engine began the first of its calls: it was sent before, or had to wait for the one before it."""
        return max(self.calls[0].submitted_at, self.answered_at)


@dataclass
class EngineCounts:
    """What the engines did in one rollout.

    slices: calls, bridges included. busy_s: seconds with a call, summed over replicas; two calls of one count once.
    """

    slices: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    busy_s: float = 0.0


class ReplicaScheduler:
    """Queues requests for replicas and hands them over in bunches.

    Args:
        client: the engines.
        max_steps_per_slice: most engine steps from bunch to bunch (``actor_rollout_ref.rollout.max_steps_per_slice``).
        call_limit_s: time limit of one call from its begin in the engine, seconds (``trainer.step_timeout``).
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
        self._replicas = [_Replica(answered_at=now, slice_ended_at=now) for _ in range(client.num_replicas)]
        self._home: dict[int, int] = {}
        self._finished = 0
        self.counts = EngineCounts()

    @property
    def calls(self) -> list[ray.ObjectRef]:
        """The calls to wait for: of each replica the one that runs. Another one may stand behind it."""
        return [replica.calls[0].ref for replica in self._replicas if replica.calls]

    def enqueue(self, group: int, request: RolloutRequest) -> None:
        """Queues a request at the replica of its group, whose prefix cache knows the task."""
        if group not in self._home:
            homes = Counter(self._home.values())
            self._home[group] = min(range(len(self._replicas)), key=lambda number: homes[number])
        self._replicas[self._home[group]].queue.append(request)
        self.counts.requests += 1
        self.counts.prompt_tokens += len(request.prompt_ids)

    def dispatch(self, environments_pending: bool) -> float | None:
        """Sends every replica the calls that are due.

        Args:
            environments_pending: replies are on their way that may bring more requests; a bunch waits a moment for
                them, so that they join now and not a slice later.

        Returns:
            Seconds until the next call is due if nothing comes back before; None if none is.
        """
        self._balance()
        waits = [self._keep_busy(number, environments_pending) for number in range(len(self._replicas))]
        return min((seconds for seconds in waits if seconds is not None), default=None)

    def collect(self, call: ray.ObjectRef) -> list[RolloutResult]:
        """Results of one of ``calls`` that is ready; an engine's error is raised here."""
        number = next(n for n, replica in enumerate(self._replicas) if replica.calls and replica.calls[0].ref == call)
        replica = self._replicas[number]
        began_at, done = replica.call_began_at, replica.calls.pop(0)
        results = self._client.receive(call)
        replica.answered_at = time.perf_counter()
        replica.running -= len(results)
        self._learn(replica, done, replica.answered_at - began_at, bool(results))
        self.counts.busy_s += replica.answered_at - began_at
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
            if replica.calls and now - replica.call_began_at > self._call_limit_s:
                raise TimeoutError(
                    f"rollout replica {number} did not finish a slice of generation within "
                    f"trainer.step_timeout={self._call_limit_s} s ({replica.running} requests running)"
                )

    def slice_steps(self) -> int:
        """Engine steps from bunch to bunch, by the mean response so far: from 8 up to the configured most."""
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

    def _keep_busy(self, number: int, environments_pending: bool) -> float | None:
        """Sends what is due; seconds until more is, None if that depends on what comes back."""
        replica = self._replicas[number]
        while replica.load and len(replica.calls) < _MOST_CALLS:
            now, last = time.perf_counter(), replica.calls[-1] if replica.calls else None
            held_s = replica.slice_ended_at + self._hold(replica) - now
            if replica.running and last is not None and not last.bridge:
                self._submit_bridge(number, replica.gap_s)
            elif not environments_pending or held_s <= 0:
                self._submit_bunch(number)
            elif not replica.running:
                return held_s
            else:  # requests run, the bunch is not complete
                bridged_s = replica.call_began_at + last.steps * replica.step_s - now - _ROUND_TRIP_S if last else 0.0
                if bridged_s > 0:
                    return min(held_s, bridged_s)
                self._submit_bridge(number, held_s / 2)
        return None

    def _hold(self, replica: _Replica) -> float:
        """Seconds after a whole slice within which the replica takes no new requests if more are about to come."""
        if replica.slice_s == 0.0:
            return _LONGEST_HOLD_S
        share = _BRIDGE_SHARE if replica.running else _HOLD_SHARE
        return min(_LONGEST_HOLD_S, share * replica.slice_s)

    def _submit_bunch(self, number: int) -> None:
        """A whole slice, with all that is queued."""
        replica = self._replicas[number]
        if replica.bunch_due:
            gap_s = min(_LONGEST_GAP_S, time.perf_counter() - replica.slice_ended_at)
            replica.gap_s = max(gap_s, replica.gap_s - _FORGET * (replica.gap_s - gap_s))
            replica.bunch_due = False
        steps = self.slice_steps()
        requests, replica.queue = replica.queue, []
        self._submit(number, requests, max((steps + 1) // 2, steps - replica.bridge_steps), bridge=False)

    def _submit_bridge(self, number: int, seconds: float) -> None:
        """A slice without new requests that lasts for ``seconds`` here, and for a round trip."""
        replica = self._replicas[number]
        steps = math.ceil((seconds + _ROUND_TRIP_S) / replica.step_s)
        replica.bridge_steps = min(max(1, self._max_steps // 2), steps)
        self._submit(number, [], replica.bridge_steps, bridge=True)

    def _submit(self, number: int, requests: list[RolloutRequest], steps: int, bridge: bool) -> None:
        replica = self._replicas[number]
        replica.running += len(requests)
        ref = self._client.submit(number, requests, steps)
        replica.calls.append(_Call(ref, len(requests), steps, bridge, submitted_at=time.perf_counter()))
        self.counts.slices += 1

    @staticmethod
    def _learn(replica: _Replica, call: _Call, seconds: float, had_results: bool) -> None:
        """Takes the times of a call that came back; one that ran out of requests does not tell those of its steps.

        A whole slice also reads prompts, and what a busy driver collects late looks longer than it was, and the call
        after it shorter. So a bridge can only lower the time of a step, and no call lowers it by more than half.
        """
        goes_on = replica.running > sum(behind.requests for behind in replica.calls)
        if not call.bridge:
            replica.slice_ended_at, replica.bunch_due = replica.answered_at, had_results and goes_on
            if had_results or goes_on:
                replica.slice_s = seconds
        if goes_on:
            step_s = max(seconds / call.steps, replica.step_s / 2)
            replica.step_s = min(replica.step_s, step_s) if call.bridge else step_s
