"""Long work says that it runs, and nothing is said or left once it has ended."""
from __future__ import annotations

import io
import logging
import sys
import threading
import time

import pytest

from verl.trainer.ppo.timing import StartupLedger, StepTimer
from verl.utils import progress
from verl.utils.progress import reported


class Terminal(io.StringIO):
    """A standard error that people look at."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def fast(monkeypatch, caplog):
    monkeypatch.setattr(progress, "FIRST_LINE_SECONDS", 0.01)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    monkeypatch.setattr(progress, "_TICK_SECONDS", 0.01)
    caplog.set_level(logging.INFO, logger=progress.__name__)
    return caplog


def reporters() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "progress"]


def wait_until(condition) -> None:
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit, "nothing was shown"
        time.sleep(0.005)


def test_where_there_is_no_terminal_lines_come_again_and_again_until_the_end(fast):
    with reported("step 3: ref"):
        wait_until(lambda: len(fast.messages) >= 3)
    shown = len(fast.messages)
    assert all(message.startswith("step 3: ref: ") and message.endswith(" s so far") for message in fast.messages)
    assert not reporters()
    time.sleep(0.05)
    assert len(fast.messages) == shown


def test_what_is_short_says_nothing(caplog):
    caplog.set_level(logging.INFO, logger=progress.__name__)
    with reported("step 3: adv"):
        pass
    assert not caplog.messages and not reporters()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_no_thread(fast, kind):
    with pytest.raises(kind), reported("step 3: update_actor"):
        wait_until(lambda: fast.messages)
        raise kind
    assert not reporters()


def test_an_interrupt_while_the_end_is_awaited_leaves_no_thread(fast, monkeypatch):
    def interrupted(self, timeout=None):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupted)
        with reported("step 3: update_actor"):
            pass
    wait_until(lambda: not reporters())


def test_a_terminal_shows_the_phase_at_once_and_clears_it(fast, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with StepTimer("step 3").phase("old_log_prob"):
        wait_until(lambda: terminal.getvalue().count("step 3: old_log_prob [00:0") >= 3)
    shown = terminal.getvalue()
    assert shown.endswith("\r") and not shown.rsplit("\r", 2)[1].strip()
    assert not fast.messages and not reporters()


def test_without_bars_a_terminal_gets_lines(fast, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with StepTimer("step 3", progress_bar=False).phase("gen", has_bar=True):
        wait_until(lambda: fast.messages)
    assert "step 3: gen" in fast.messages[0] and not terminal.getvalue()


def test_a_phase_with_a_bar_of_its_own_is_left_alone(fast):
    with StepTimer("step 3").phase("gen", has_bar=True):
        assert not reporters()


def test_parts_of_the_start_say_what_is_waited_for(fast):
    with StartupLedger().part("waiting_for_ranks", "waiting for ranks to load the model"):
        wait_until(lambda: fast.messages)
    assert fast.messages[0].startswith("start: waiting for ranks to load the model: ")
