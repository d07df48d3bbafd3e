"""Hearing of a rank that fails while the driver is busy with something else."""
from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ray

FAILURE_SIGNAL = signal.SIGURG
"""Sent to the main thread when a rank has failed. By default a process ignores it, so that a late one does nothing."""

_WITH_BLOCKS_TO_INTERRUPT = (__name__, "verl.trainer.ppo.termination", "verl.utils.progress")
_KNOCK_SECONDS = 0.2  # between two signals to a main thread that has not answered


def between_blocks(frame: FrameType | None) -> bool:
    """Whether a ``with`` is being entered or left in this frame: what a handler raises there passes the block by."""
    return frame is not None and frame.f_globals.get("__name__") in ("contextlib", *_WITH_BLOCKS_TO_INTERRUPT)


class _RankFailed(KeyboardInterrupt):
    """Leaves what the driver does. Ray's waits end with a ``KeyboardInterrupt`` and drop what else a handler raises."""


@contextmanager
def interrupted_by_failure(calls: Iterable[ray.ObjectRef], report: Callable[[], object]) -> Iterator[None]:
    """Around what the driver does while ranks work: when a call fails, the block is left at once and the error raised.

    Nothing waits meanwhile: Ray announces the end of a call in a thread of its own, and a failure then sends signals to
    the main thread, whose handler raises. A call into C that looks at no signals is finished first. If the driver fails
    by itself, that error stays. In another thread than the main one the block is not interrupted, and whoever waits for
    the calls afterwards hears of the failure.

    Args:
        calls: what the ranks do meanwhile.
        report: waits for the calls, and so raises the error of the one that failed, with its rank.
    """
    main = threading.main_thread()
    if threading.current_thread() is not main:
        yield
        return
    watching, interrupted = True, False
    left = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal watching, interrupted
        if watching and not between_blocks(frame):  # once; where it is not the time, the next knock comes
            watching, interrupted = False, True
            raise _RankFailed

    def knock() -> None:
        # One signal is not enough: where it comes just before the main thread begins to wait, the wait goes on.
        while watching:
            assert main.ident is not None, "the main thread runs"
            signal.pthread_kill(main.ident, FAILURE_SIGNAL)
            left.wait(_KNOCK_SECONDS)

    def ended(call: Future[Any]) -> None:
        if watching and call.exception() is not None:
            threading.Thread(target=knock, name="rank-failure", daemon=True).start()

    before = signal.signal(FAILURE_SIGNAL, interrupt)
    try:
        try:
            for ref in calls:
                ref.future().add_done_callback(ended)
            yield
        finally:
            watching = False
    except BaseException as error:
        if not interrupted or isinstance(error, GeneratorExit):
            raise
    finally:
        left.set()
        signal.signal(FAILURE_SIGNAL, before or signal.SIG_DFL)
    if interrupted:
        report()
        raise AssertionError("a call to a rank failed, but waiting for it raised nothing")
