"""Signals stop a run between steps, or inside a step that may be dropped."""
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl.trainer.ppo.termination import StopSignals, TerminationGuard, TerminationRequested, undisturbed


@pytest.fixture(autouse=True)
def not_under_nohup() -> Iterator[None]:
    """Here, and in processes that a test starts, SIGHUP is not ignored, however the tests themselves are run."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_an_interruptible_part_is_left_at_once():
    reached = []
    with TerminationGuard() as guard:
        with guard.interruptible():
            os.kill(os.getpid(), signal.SIGTERM)
            reached.append("after")
    assert guard.requested is signal.SIGTERM and not reached
    with pytest.raises(TerminationRequested) as error:
        guard.raise_if_requested(3, Path("x"))
    assert error.value.code == 143


def test_elsewhere_the_signal_waits():
    reached = []
    with TerminationGuard() as guard:
        os.kill(os.getpid(), signal.SIGTERM)
        reached.append("after")
    assert guard.requested is signal.SIGTERM and reached


def test_a_signal_from_before_the_interruptible_part_drops_it_as_well():
    reached = []
    with TerminationGuard() as guard:
        os.kill(os.getpid(), signal.SIGTERM)
        with guard.interruptible():
            guard.drop_if_requested()
            reached.append("rollout")
    assert guard.requested is signal.SIGTERM and not reached


class LostRank(RuntimeError):
    remote_traceback = ""


def test_a_rank_that_failed_before_the_signal_is_not_hidden_by_it(caplog: pytest.LogCaptureFixture):
    with pytest.raises(TerminationRequested) as error, StopSignals():
        try:
            raise LostRank("actor_rollout rank 1 failed in update_actor\nmore")
        finally:  # while the ranks end
            os.kill(os.getpid(), signal.SIGTERM)
    assert error.value.code == 143
    assert "the run had failed before SIGTERM came: actor_rollout rank 1 failed in update_actor" in caplog.messages


def test_a_rank_that_is_lost_because_of_the_signal_is_no_failure(caplog: pytest.LogCaptureFixture):
    with pytest.raises(TerminationRequested) as error, StopSignals():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            raise LostRank("actor_rollout rank 1 failed in init_model")
    assert error.value.code == 143 and "had failed" not in caplog.text


def test_a_second_signal_in_a_step_ends_the_run_without_saying_that_no_step_is_under_way(caplog):
    with pytest.raises(TerminationRequested) as error, StopSignals(), TerminationGuard():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert error.value.code == 143
    assert [record.message for record in caplog.records] == [
        "SIGTERM: saving a checkpoint and stopping (send it again to stop at once)",
        "SIGTERM: stopping at once; checkpoints written so far are whole",
    ]


@pytest.fixture()
def sent_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM comes again while the first one is being taken, as GNU ``timeout`` sends it."""
    monkeypatch.setattr(time, "sleep", lambda seconds: os.kill(os.getpid(), signal.SIGTERM))


def test_a_signal_that_is_sent_twice_at_once_is_one(sent_twice: None, caplog: pytest.LogCaptureFixture) -> None:
    saved = False
    with pytest.raises(TerminationRequested), StopSignals() as signals:
        with TerminationGuard() as guard, guard.interruptible():
            os.kill(os.getpid(), signal.SIGTERM)
        saved = True
        assert guard.requested is signal.SIGTERM and signals.requested is None
        with undisturbed():
            os.kill(os.getpid(), signal.SIGTERM)
    assert saved and [record.message for record in caplog.records] == [
        "SIGTERM: saving a checkpoint and stopping (send it again to stop at once)",
        "SIGTERM: stopping as soon as imports are done",
        "SIGTERM: stopping at once; checkpoints written so far are whole",
    ]


def test_under_nohup_a_closed_terminal_stops_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals(), TerminationGuard() as guard, guard.interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
        assert guard.requested is None
    finally:
        signal.signal(signal.SIGHUP, before)


SAVES_AFTER_THE_TERMINAL_IS_CLOSED = """
import os, pathlib, signal, sys, time
from verl.trainer.ppo.termination import StopSignals, TerminationGuard
with StopSignals(), TerminationGuard() as guard:
    print("ready", flush=True)
    deadline = time.monotonic() + 60
    while guard.requested is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGHUP)  # the shell sends it, and then the kernel
    print("a line of the step", flush=True)
    pathlib.Path(sys.argv[1]).write_text("checkpoint")
    guard.raise_if_requested(1, pathlib.Path(sys.argv[1]))
"""


def test_a_closed_terminal_does_not_keep_the_checkpoint_from_being_written(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", SAVES_AFTER_THE_TERMINAL_IS_CLOSED, str(tmp_path / "saved")]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    assert b"ready" in os.read(ours, 1000)
    os.close(ours)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=100) == 128 + signal.SIGHUP
    assert (tmp_path / "saved").read_text() == "checkpoint"


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with TerminationGuard():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_broke_because_of_the_interrupt_is_the_interrupt():
    with TerminationGuard() as guard:
        with guard.interruptible():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except BaseException as error:
                raise SystemError("returned a result with an exception set") from error
    assert guard.requested is signal.SIGTERM


def test_other_errors_are_not_hidden():
    with pytest.raises(RuntimeError, match="real"), TerminationGuard() as guard, guard.interruptible():
        raise RuntimeError("a real one")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_where_nothing_is_to_be_saved_the_run_ends_at_once(number: signal.Signals, code: int):
    before, ended = (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)), []
    with pytest.raises(TerminationRequested) as error, StopSignals():
        try:
            os.kill(os.getpid(), number)
            ended.append("went on")
        finally:
            ended.append("ranks")
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # a second one does not wait for that
    assert error.value.code == code and ended == ["ranks"]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_handlers_that_ray_has_set_meanwhile_are_replaced_and_its_answer_is_understood():
    def answer_of_ray(number: int, _frame: object) -> None:
        raise SystemExit(number)

    before = signal.getsignal(signal.SIGTERM)
    for listen, cause in ((True, False), (False, True)):
        with pytest.raises(TerminationRequested) as error, StopSignals() as signals:
            signal.signal(signal.SIGTERM, answer_of_ray)
            if listen:
                signals.listen()
            os.kill(os.getpid(), signal.SIGTERM)
        assert error.value.code == 143 and (error.value.__cause__ is not None) == cause
        assert signal.getsignal(signal.SIGTERM) is before


def test_what_broke_because_of_the_signal_is_the_signal_and_other_ends_stay_what_they_are():
    with pytest.raises(TerminationRequested), StopSignals():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException as error:
            raise SystemError("returned a result with an exception set") from error
    with pytest.raises(SystemExit, match="1"), StopSignals():
        raise SystemExit(1)
    with pytest.raises(RuntimeError, match="real"), StopSignals():
        raise RuntimeError("a real one")


def test_the_guard_of_the_loop_gives_the_signals_back():
    with pytest.raises(TerminationRequested), StopSignals() as signals:
        with TerminationGuard() as guard:
            os.kill(os.getpid(), signal.SIGTERM)
        assert guard.requested is signal.SIGTERM and signals.requested is None
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_waits_for_the_end_of_imports(number: int) -> None:
    reached = False
    with pytest.raises(TerminationRequested) as error, StopSignals():
        with undisturbed():
            signal.raise_signal(number)
            reached = True
        raise AssertionError("the signal is lost")
    assert reached and error.value.code == 128 + number


def test_a_second_signal_does_not_wait_for_imports() -> None:
    code = """
import signal
from verl.trainer.ppo.termination import undisturbed
with undisturbed():
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    print("went on", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGTERM and "went on" not in done.stdout


def test_imports_without_a_signal_leave_the_handlers_as_they_were() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(RuntimeError, match="real"), undisturbed():
        raise RuntimeError("real")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
