"""A rank that fails ends what the driver does meanwhile, and its error is the one reported. Real Ray, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import ray

from verl.trainer.ppo.rank_failure import FAILURE_SIGNAL, interrupted_by_failure
from verl.trainer.ppo.termination import TerminationGuard, undisturbed

HOURS = 4 * 3600.0  # as good as for ever: a test that waits for it is ended by pytest's own limit


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, address="local", logging_level="WARNING")
    yield
    ray.shutdown()


@ray.remote(num_cpus=0)
class Rank:
    """What a rank may do while the driver is busy."""

    def __init__(self, package: str | None = None) -> None:
        if package:
            raise ImportError(f"there is no {package}")

    def fail(self) -> None:
        raise KeyError("a tensor of the model")

    def end(self) -> None:
        os._exit(3)

    def load(self) -> int:
        return 7

    def sleep(self) -> None:
        time.sleep(HOURS)


@pytest.fixture(scope="module")
def rank(local_ray: None) -> Any:
    actor = Rank.remote()
    assert ray.get(actor.load.remote()) == 7
    return actor


@pytest.fixture(scope="module")
def sleeper(local_ray: None) -> ray.ObjectRef:
    return Rank.remote().sleep.remote()


def carry_on(sleeper: ray.ObjectRef) -> None:
    """Code of a user's that tries over and over, whatever happens."""
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            continue


BUSY: dict[str, Callable[[ray.ObjectRef], Any]] = {
    "sleeps": lambda sleeper: time.sleep(HOURS),
    "computes": lambda sleeper: sum(1 for _ in iter(int, 1)),
    "waits for a thread": lambda sleeper: threading.Event().wait(HOURS),
    "waits for a program": lambda sleeper: subprocess.run(["sleep", str(HOURS)], check=True),
    "gets from Ray": lambda sleeper: ray.get(sleeper),
    "waits for Ray": lambda sleeper: ray.wait([sleeper], timeout=HOURS),
    "carries on": carry_on,
}


@pytest.mark.parametrize("doing", BUSY)
def test_whatever_the_driver_does_it_is_left_when_a_call_fails(doing: str, rank: Any, sleeper: ray.ObjectRef) -> None:
    asked = []

    def report() -> None:
        asked.append(doing)
        ray.get(call)

    calls = [rank.load.remote(), call := rank.fail.remote()]
    with pytest.raises(KeyError, match="a tensor of the model"), interrupted_by_failure(calls, report):
        BUSY[doing](sleeper)
    assert asked == [doing]
    assert signal.getsignal(FAILURE_SIGNAL) == signal.SIG_DFL


FAILING: dict[str, tuple[Callable[[], ray.ObjectRef], str]] = {
    "constructor": (lambda: Rank.remote("numpi").load.remote(), "there is no numpi"),
    "killed": (lambda: Rank.remote().end.remote(), "died"),
}


@pytest.mark.parametrize("how", FAILING)
def test_ranks_that_fail_to_start_or_are_lost_count_as_well(how: str) -> None:
    start, said = FAILING[how]
    call = start()
    with pytest.raises(ray.exceptions.RayActorError, match=said), interrupted_by_failure([call], lambda: ray.get(call)):
        time.sleep(HOURS)


def test_a_call_that_has_failed_before_is_reported_before_anything_is_done(rank: Any) -> None:
    call = rank.fail.remote()
    ray.wait([call])
    with pytest.raises(KeyError), interrupted_by_failure([call], lambda: ray.get(call)):
        time.sleep(HOURS)


def test_a_driver_that_is_done_or_fails_by_itself_is_left_alone(rank: Any) -> None:
    def report() -> None:
        raise AssertionError("nothing failed")

    with interrupted_by_failure([rank.load.remote()], report):
        done = 3
    assert done == 3
    with pytest.raises(OSError, match="no such file"), interrupted_by_failure([rank.load.remote()], report):
        raise OSError("no such file")
    late = Rank.remote()
    with interrupted_by_failure([call := late.sleep.remote()], report):
        done = 4
    ray.kill(late)
    ray.wait([call])  # fails after the block, which nobody is interrupted for
    time.sleep(0.1)
    assert done == 4


@contextmanager
def frame_of_contextlib() -> Iterator[FrameType]:
    """What runs where a ``with`` is entered or left."""
    yield sys._getframe(1)


def test_a_block_is_not_interrupted_where_it_is_entered_or_left(rank: Any, sleeper: ray.ObjectRef) -> None:
    def report() -> None:
        ray.get(rank.fail.remote())

    went_on = []
    with pytest.raises(KeyError), interrupted_by_failure([sleeper], report):
        handler = signal.getsignal(FAILURE_SIGNAL)
        with frame_of_contextlib() as frame:
            handler(FAILURE_SIGNAL, frame)
        went_on.append("inside")
        handler(FAILURE_SIGNAL, sys._getframe())
        went_on.append("after the failure")
    assert went_on == ["inside"]


def test_a_step_is_not_dropped_where_its_block_is_left_but_right_after() -> None:
    went_on = []
    with TerminationGuard() as guard, guard.interruptible():
        with frame_of_contextlib() as frame:
            signal.getsignal(signal.SIGTERM)(signal.SIGTERM, frame)
        went_on.append("inside")
        guard.drop_if_requested()
        went_on.append("after the signal")
    assert went_on == ["inside"] and guard.requested is signal.SIGTERM


def test_imports_are_finished_first(rank: Any) -> None:
    call = rank.fail.remote()
    finished = []
    with pytest.raises(KeyError), interrupted_by_failure([call], lambda: ray.get(call)):
        with undisturbed():
            ray.wait([call])
            time.sleep(0.2)
            finished.append("imports")
        finished.append("what comes after them")
    assert finished == ["imports"]
    assert FAILURE_SIGNAL not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_outside_of_the_main_thread_nothing_is_interrupted(rank: Any) -> None:
    finished = []

    def drive() -> None:
        call = rank.fail.remote()
        with interrupted_by_failure([call], lambda: ray.get(call)):
            ray.wait([call])
            finished.append("the block")

    thread = threading.Thread(target=drive)
    thread.start()
    thread.join(timeout=60)
    assert finished == ["the block"]


@pytest.mark.parametrize("doing", ["gets from Ray", "waits for Ray"])
def test_a_step_that_waits_for_ranks_is_dropped_when_the_run_is_to_stop(doing: str, sleeper: ray.ObjectRef) -> None:
    with TerminationGuard() as guard:
        stop = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGTERM))
        stop.start()
        with guard.interruptible():
            BUSY[doing](sleeper)
        stop.join()
    assert guard.requested is signal.SIGTERM
