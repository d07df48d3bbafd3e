"""The scheduler over engines whose time is computed: who gets which requests, when, and that no engine stands still."""

from __future__ import annotations

import random

import numpy as np
import pytest

from agent_system.multi_turn_rollout import scheduler as scheduler_module
from agent_system.multi_turn_rollout.scheduler import ReplicaScheduler
from verl.workers.rollout.base import RolloutRequest, RolloutResult, SamplingSettings

TRAVEL_S = 0.002  # of a call to its engine, and of results back


class Clock:
    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(scheduler_module, "time", clock)
    return clock


class Engines:
    """Engines that run their calls in order. A step takes ``step_s``; a request's answer is as long as its prompt."""

    def __init__(self, clock: Clock, replicas: int = 1, step_s: float = 0.01) -> None:
        self.num_replicas, self._clock, self._step_s = replicas, clock, step_s
        self.calls: list[tuple[int, list[str], int]] = []  # replica, requests that join, steps
        self.arrivals: list[float] = []  # of the results of each call
        self.stood_still_s = 0.0  # between calls, while requests run
        self.most_outstanding = 0
        self._running: list[dict[str, int]] = [{} for _ in range(replicas)]
        self._free_at = [clock.now] * replicas
        self._results: dict[int, list[RolloutResult]] = {}  # by call, until they are received
        self._sizes: dict[str, int] = {}

    def submit(self, replica: int, requests: list[RolloutRequest], max_steps: int) -> int:
        call, running = len(self.calls), self._running[replica]
        begin = max(self._free_at[replica], self._clock.now + TRAVEL_S)
        if running:
            self.stood_still_s += begin - self._free_at[replica]
        self.calls.append((replica, [request.request_id for request in requests], max_steps))
        running.update({request.request_id: len(request.prompt_ids) for request in requests})
        self._sizes.update({request.request_id: len(request.prompt_ids) for request in requests})
        steps = min(max_steps, max(running.values(), default=0))
        self._results[call] = [self._answer(name) for name, left in running.items() if left <= steps]
        self._running[replica] = {name: left - steps for name, left in running.items() if left > steps}
        self._free_at[replica] = begin + steps * self._step_s
        self.arrivals.append(self._free_at[replica] + TRAVEL_S)
        outstanding = sum(self.calls[other][0] == replica for other in self._results)
        self.most_outstanding = max(self.most_outstanding, outstanding)
        return call

    def receive(self, call: int) -> list[RolloutResult]:
        assert self._clock.now >= self.arrivals[call]
        return self._results.pop(call)

    def check(self) -> None:
        pass

    def _answer(self, name: str) -> RolloutResult:
        size = self._sizes[name]
        return RolloutResult(name, np.zeros(size, np.int32), np.zeros(size, np.float32), "stop")


def request(name, length=10):
    return RolloutRequest(name, np.zeros(length, np.int32), SamplingSettings(1.0), 0)


def come_back(scheduler, engines, clock, replica=0):
    """Waits for the call that runs at ``replica``, and collects it."""
    [call] = [call for call in scheduler.calls if engines.calls[call][0] == replica]
    clock.now = max(clock.now, engines.arrivals[call])
    return [result.request_id for result in scheduler.collect(call)]


def play(scheduler, engines, clock, episodes, reply_s):
    """Plays episodes, lists of answers' lengths, as the rollout loop does; environments answer within ``reply_s``."""
    rng, turns, left = random.Random(0), [0] * len(episodes), len(episodes)
    replies: dict[int, float] = {}
    for slot, lengths in enumerate(episodes):
        scheduler.enqueue(slot // 4, request(f"{slot}.0", lengths[0]))
    while left:
        hold = scheduler.dispatch(environments_pending=bool(replies))
        assert scheduler.calls or replies
        times = [engines.arrivals[call] for call in scheduler.calls] + list(replies.values())
        clock.now = max(clock.now, min(times + ([] if hold is None else [clock.now + hold])))
        for slot in [slot for slot, ready in replies.items() if ready <= clock.now]:
            del replies[slot]
            scheduler.enqueue(slot // 4, request(f"{slot}.{turns[slot]}", episodes[slot][turns[slot]]))
        for call in scheduler.calls:
            if engines.arrivals[call] <= clock.now:
                for result in scheduler.collect(call):
                    slot = int(result.request_id.split(".")[0])
                    turns[slot] += 1
                    if turns[slot] == len(episodes[slot]):
                        left -= 1
                    else:
                        replies[slot] = clock.now + rng.uniform(0.3, 1.0) * reply_s


def draw_episodes(count=32, turns=6, answers=(20, 200), and_a_long_one=4000):
    """Episodes of which the first has one answer that outlasts all others, so that an engine always has work."""
    rng = random.Random(1)
    drawn = [[rng.randint(*answers) for _ in range(rng.randint(1, turns))] for _ in range(count)]
    return [[and_a_long_one], *drawn]


@pytest.mark.parametrize("step_s", [0.002, 0.01])
@pytest.mark.parametrize("reply_s", [0.0, 0.01, 1.0])
def test_an_engine_with_requests_does_not_stand_still(clock, step_s, reply_s):
    engines, episodes = Engines(clock, step_s=step_s), draw_episodes()
    scheduler, begin = ReplicaScheduler(engines, 32, 60), clock.now
    play(scheduler, engines, clock, episodes, reply_s)
    assert engines.stood_still_s < 0.01 * (clock.now - begin)
    assert engines.most_outstanding == 2
    joined = [name for _, names, _ in engines.calls for name in names]
    assert sorted(joined) == sorted(f"{slot}.{turn}" for slot, each in enumerate(episodes) for turn in range(len(each)))
    assert scheduler.counts.generated_tokens == sum(map(sum, episodes))
    assert scheduler.counts.slices == len(engines.calls)


@pytest.mark.parametrize("step_s", [0.0005, 0.1])
def test_engines_far_faster_or_slower_than_expected(clock, step_s):
    engines = Engines(clock, step_s=step_s)
    begin = clock.now
    play(ReplicaScheduler(engines, 32, 60), engines, clock, draw_episodes(), reply_s=0.005)
    assert engines.stood_still_s < 0.05 * (clock.now - begin)
    assert engines.most_outstanding == 2


def test_two_replicas_go_on_each_for_itself(clock):
    engines, episodes = Engines(clock, replicas=2), [[4000], *draw_episodes(count=31)]
    episodes[4] = [4000]  # of another group, hence at the other replica
    scheduler = ReplicaScheduler(engines, 32, 60)
    play(scheduler, engines, clock, episodes, reply_s=0.01)
    assert engines.stood_still_s < 0.01 * 40
    assert engines.most_outstanding == 2
    assert {replica for replica, names, _ in engines.calls if names} == {0, 1}


def test_a_bridge_stands_behind_every_whole_slice_and_requests_join_only_those(clock):
    engines = Engines(clock)
    scheduler = ReplicaScheduler(engines, 32, 60)
    for name in ("a", "b"):
        scheduler.enqueue(0, request(name, 10 if name == "a" else 400))
    assert scheduler.dispatch(environments_pending=False) is None
    (_, whole, steps), (_, bridge, fewer) = engines.calls
    assert whole == ["a", "b"] and bridge == []
    assert 1 <= fewer < steps == 32
    scheduler.enqueue(0, request("c", 400))
    assert scheduler.dispatch(environments_pending=False) is None  # two calls at a time
    assert come_back(scheduler, engines, clock) == ["a"]
    wait = scheduler.dispatch(environments_pending=True)
    assert wait is not None and 0 < wait <= 0.05  # the bridge runs, the bunch is not complete
    assert len(engines.calls) == 2
    assert scheduler.dispatch(environments_pending=False) is None  # now it is
    assert engines.calls[2][1] == ["c"]
    scheduler.enqueue(0, request("d", 400))
    assert come_back(scheduler, engines, clock) == []
    scheduler.dispatch(environments_pending=False)
    assert engines.calls[3][1] == []
    come_back(scheduler, engines, clock)
    scheduler.dispatch(environments_pending=False)
    assert engines.calls[4][1] == ["d"]
    assert engines.most_outstanding == 2


def test_a_further_bridge_follows_when_the_bunch_takes_longer_than_bridged(clock):
    engines = Engines(clock)
    scheduler = ReplicaScheduler(engines, 32, 60)
    scheduler._replicas[0].gap_s = 0.0  # bunches were quick so far
    for name in ("a", "b"):
        scheduler.enqueue(0, request(name, 10 if name == "a" else 400))
    scheduler.dispatch(environments_pending=False)
    come_back(scheduler, engines, clock)
    clock.now += scheduler.dispatch(environments_pending=True)
    assert clock.now + TRAVEL_S < engines.arrivals[1] - TRAVEL_S  # there is time to send another
    scheduler.enqueue(0, request("c"))
    assert scheduler.dispatch(environments_pending=True) is None
    assert engines.calls[2][1] == []
    come_back(scheduler, engines, clock)
    assert scheduler.dispatch(environments_pending=False) is None
    assert engines.calls[3][1] == ["c"]
    assert engines.stood_still_s == 0


def test_requests_wait_for_a_bridge_no_longer_than_for_a_longer_slice(clock):
    engines = Engines(clock)
    scheduler = ReplicaScheduler(engines, 32, 60)
    scheduler._finished, scheduler.counts.generated_tokens = 10, 1000
    scheduler.enqueue(0, request("a", 400))
    for bridge in (6, 8, 15):
        scheduler._replicas[0].gap_s = bridge * scheduler._replicas[0].step_s - 0.006  # a round trip is 5 ms
        scheduler.dispatch(environments_pending=False)
        assert engines.calls[-1][2] == bridge
        come_back(scheduler, engines, clock)
        scheduler.dispatch(environments_pending=False)
        assert engines.calls[-1][2] == max(10, 20 - bridge)  # 2 sqrt(100) steps with the bridge
        come_back(scheduler, engines, clock)


def test_an_idle_engine_waits_a_moment_for_environments_that_are_about_to_answer(clock):
    engines = Engines(clock)
    scheduler = ReplicaScheduler(engines, 32, 60)
    scheduler.enqueue(0, request("a"))
    wait = scheduler.dispatch(environments_pending=True)
    assert 0 < wait <= 0.05
    assert engines.calls == []
    clock.now += wait
    assert scheduler.dispatch(environments_pending=True) is None
    assert engines.calls[0] == (0, ["a"], 32)


def test_a_bridge_with_nothing_to_run_delays_no_request(clock):
    engines = Engines(clock)
    scheduler = ReplicaScheduler(engines, 32, 60)
    scheduler.enqueue(0, request("a"))
    scheduler.dispatch(environments_pending=False)
    assert come_back(scheduler, engines, clock) == ["a"]
    assert scheduler.dispatch(environments_pending=True) is None  # nothing to do
    scheduler.enqueue(0, request("b"))
    wait = scheduler.dispatch(environments_pending=True)
    assert wait == pytest.approx(0.1 * (10 * 0.01 + 2 * TRAVEL_S))  # a tenth of the slice
    assert scheduler.dispatch(environments_pending=False) is None
    assert engines.calls[2][1] == ["b"]  # although the bridge has not been collected
    assert come_back(scheduler, engines, clock) == []
    assert clock.now < engines.arrivals[2]


def test_the_clock_of_a_call_starts_when_the_one_before_it_has_ended(clock):
    engines = Engines(clock, step_s=1.0)
    scheduler, begin = ReplicaScheduler(engines, 32, call_limit_s=60), clock.now
    for name in ("a", "b"):
        scheduler.enqueue(0, request(name, 400))
    scheduler.dispatch(environments_pending=False)
    clock.now = begin + 59
    scheduler.check()
    come_back(scheduler, engines, clock)
    clock.now = begin + 118
    scheduler.check()
    clock.now = begin + 120
    with pytest.raises(TimeoutError, match=r"replica 0 .* trainer\.step_timeout=60 s \(2 requests running\)"):
        scheduler.check()


def test_time_with_two_calls_counts_once(clock):
    engines = Engines(clock)
    scheduler, begin = ReplicaScheduler(engines, 32, 60), clock.now
    scheduler.enqueue(0, request("a", 1000))
    scheduler.dispatch(environments_pending=False)
    for _ in range(2):
        come_back(scheduler, engines, clock)
    assert scheduler.counts.busy_s == pytest.approx(clock.now - begin)


def test_an_error_of_the_engine_is_raised_once(clock):
    engines = Engines(clock)
    scheduler = ReplicaScheduler(engines, 32, 60)
    scheduler.enqueue(0, request("a"))
    scheduler.dispatch(environments_pending=False)

    def fail(call):
        raise MemoryError("no room for the cache")

    received, engines.receive = engines.receive, fail
    with pytest.raises(MemoryError, match="no room"):
        come_back(scheduler, engines, clock)
    engines.receive = received
    assert come_back(scheduler, engines, clock) == []  # the bridge
    assert scheduler.calls == []


def test_a_request_that_the_engine_gives_up_ends_the_run(clock):
    engines = Engines(clock)
    scheduler = ReplicaScheduler(engines, 32, 60)
    scheduler.enqueue(0, request("a"))
    scheduler.dispatch(environments_pending=False)
    engines._results[0][0].finish_reason = "abort"
    with pytest.raises(RuntimeError, match="replica 0 gave up request a"):
        come_back(scheduler, engines, clock)


def test_groups_stay_together_and_loads_stay_even(clock):
    engines = Engines(clock, replicas=2)
    scheduler = ReplicaScheduler(engines, 32, 60)
    for group in range(4):
        for member in range(8):
            scheduler.enqueue(group, request(f"{group}.{member}"))
    assert scheduler.dispatch(environments_pending=False) is None
    first, second = (set(name.split(".")[0] for name in names) for _, names, _ in engines.calls if names)
    assert (first, second) == ({"0", "2"}, {"1", "3"})


def test_a_group_moves_away_from_a_crowd(clock):
    engines = Engines(clock, replicas=2)
    scheduler = ReplicaScheduler(engines, 32, 60)
    for member in range(20):
        scheduler.enqueue(0, request(str(member)))
    scheduler.dispatch(environments_pending=False)
    sizes = sorted(len(names) for _, names, _ in engines.calls if names)
    assert sum(sizes) == 20
    assert sizes[0] >= 5


def test_slices_grow_with_the_root_of_the_mean_answer_within_their_limits(clock):
    scheduler = ReplicaScheduler(Engines(clock), 32, 60)
    assert scheduler.slice_steps() == 32  # nothing is known of the answers yet
    scheduler._finished = 10
    for mean, steps in ((4, 8), (25, 10), (169, 26), (1000, 32)):  # 2 sqrt(mean)
        scheduler.counts.generated_tokens = 10 * mean
        assert scheduler.slice_steps() == steps
    assert ReplicaScheduler(Engines(clock), 4, 60).slice_steps() == 4
    costly = ReplicaScheduler(Engines(clock), 64, 60, join_cost=8)
    costly._finished, costly.counts.generated_tokens = 10, 1000
    assert costly.slice_steps() == 40
