"""SIGTERM, SIGHUP (a terminal is closed) and Ctrl-C: save what is finished, then stop."""
from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from verl.trainer.ppo.rank_failure import FAILURE_SIGNAL, between_blocks

logger = logging.getLogger(__name__)

_REPEAT_SECONDS = 0.1  # a human needs longer to send a second one


class TerminationRequested(SystemExit):
    """The run was asked to stop; a checkpoint of the last finished step was written, if there is one."""


class _Interrupt(KeyboardInterrupt):
    """Leaves the interruptible part of a step. Ray's waits end with a ``KeyboardInterrupt`` of their own for it."""


def _stop_signals() -> tuple[signal.Signals, ...]:
    """Those that end a run: SIGHUP is none under ``nohup``, which has it ignored."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return signal.SIGTERM, signal.SIGINT, *hangup


def _ignore_repeats(number: int) -> None:
    """For a moment, drop a signal that was just taken: GNU ``timeout`` sends it to a process and then to its group.

    The caller sets the next handler afterwards.
    """
    signal.signal(number, signal.SIG_IGN)
    time.sleep(_REPEAT_SECONDS)
    if number == signal.SIGHUP:
        _leave_closed_terminal()


def _leave_closed_terminal() -> None:
    """What is written to a terminal that was closed raises, and so would end the run before its checkpoint."""
    for stream in (1, 2):
        try:
            os.write(stream, b"\n")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, then what it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _stems_from_interrupt(error: BaseException | None) -> bool:
    """Whether the interrupt, or something that broke because of it (a call into C that it cut short), was raised."""
    return any(isinstance(one, (KeyboardInterrupt, TerminationRequested)) for one in _chain(error))


def _failure_before(error: BaseException | None) -> BaseException | None:
    """The failure of a rank (told by its traceback from there) that was on its way out when the signal came."""
    failures = (one for one in _chain(error) if hasattr(one, "remote_traceback"))
    return next((one for one in failures if not _stems_from_interrupt(one)), None)


class TerminationGuard:
    """Turns SIGTERM, SIGHUP and SIGINT into an orderly stop.

    Inside ``interruptible()`` the step is dropped at once, since nothing has been learnt from it yet; elsewhere
    (update, saving, validation) the signal waits until that is done. A second signal is answered as it was before.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._may_interrupt = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> TerminationGuard:
        for number in _stop_signals():
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:  # a repeat, before it could be ignored
            return
        self.requested = signal.Signals(number)
        _ignore_repeats(number)
        logger.warning("%s: saving a checkpoint and stopping (send it again to stop at once)", self.requested.name)
        self._restore()
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)  # shell and kernel both send it, and nobody can send it again
        if self._may_interrupt and not between_blocks(frame):
            raise _Interrupt

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """The part of a step that may be dropped; begins with ``drop_if_requested``."""
        self._may_interrupt = True
        try:
            yield
        except BaseException as error:
            if self.requested is None or not _stems_from_interrupt(error):
                raise
            logger.info("the running step is dropped")
        finally:
            self._may_interrupt = False

    def drop_if_requested(self) -> None:
        """Leave the interruptible part if a signal came before it began."""
        if self.requested is not None:
            raise _Interrupt

    def raise_if_requested(self, step: int, root: Path) -> None:
        """End the process with 128 + signal number, as the shell would."""
        if self.requested is not None:
            logger.warning("stopped after step %d; the same command resumes from %s", step, root)
            raise TerminationRequested(128 + self.requested)


class StopSignals:
    """SIGTERM, SIGHUP and Ctrl-C where nothing is to be saved: while a run starts, validates first, and ends.

    The first one raises ``TerminationRequested`` wherever the run is, and so ends what it has started. A second one
    ends the process as the system does. The second one of a ``TerminationGuard`` comes here as the first.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        self.listen()
        return self

    def listen(self) -> None:
        """Take the signals; again after ``ray.init``, which takes SIGTERM and answers it with an abort."""
        for number in _stop_signals():
            previous = signal.signal(number, self._handle)
            self._previous.setdefault(number, previous)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler or signal.SIG_DFL)
        self._previous.clear()
        if self.requested is None and isinstance(error, SystemExit) and error.code == signal.SIGTERM:
            self.requested = signal.SIGTERM  # answered by Ray, in the middle of ray.init
            logger.warning("SIGTERM: stopping")
        failure = _failure_before(error) if self.requested is not None else None
        if failure is not None:  # else the signal would hide it
            logger.error("the run had failed before %s came: %s", self.requested.name, str(failure).splitlines()[0])
        if self.requested is not None and not isinstance(error, TerminationRequested):
            raise TerminationRequested(128 + self.requested) from error  # calls into C fail in ways of their own

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            return
        self.requested = signal.Signals(number)
        _ignore_repeats(number)
        logger.warning("%s: stopping at once; checkpoints written so far are whole", self.requested.name)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise TerminationRequested(128 + number)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Hold SIGTERM, SIGHUP, Ctrl-C and the failure of a rank back until the block ends; for imports of C++ extensions.

    What a handler raises in the middle of torch's import meets C++ code that expects no exception, and the process
    aborts. A second signal ends the process as the system does. Without effect outside the main thread.
    """
    held: list[int] = []
    taken = False
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal taken
        if taken:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if held:
            return
        held.append(number)
        _ignore_repeats(number)
        signal.signal(number, hold)
        taken = True
        logger.warning("%s: stopping as soon as imports are done", signal.Signals(number).name)

    handlers = {number: signal.getsignal(number) for number in _stop_signals()}
    handlers = {number: handler for number, handler in handlers.items() if handler is not None}  # None: not Python's
    for number in handlers:
        signal.signal(number, hold)
    blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, {FAILURE_SIGNAL})
    try:
        yield
    finally:
        try:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            if held:
                signal.raise_signal(held[0])
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)


def end_all(owner: object, parts: Mapping[str, str]) -> None:
    """Call the ending method of each part of ``owner`` that is there.

    What fails is logged, so that everything is tried and the error that ended the run stays the one reported.

    Args:
        parts: attribute to the name of its ending method.
    """
    for name, method in parts.items():
        part = getattr(owner, name, None)
        if part is None:
            continue
        try:
            getattr(part, method)()
        except Exception:
            logger.exception("%s did not end as it should", name)
