"""Signals stop a run between steps, or inside a step that may be dropped."""
import os
import signal
from pathlib import Path

import pytest

from verl.trainer.ppo.termination import TerminationGuard, TerminationRequested


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
