"""Saying that something long still runs."""
from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

logger = logging.getLogger(__name__)

FIRST_LINE_SECONDS = 10.0
LINE_SECONDS = 30.0
_TICK_SECONDS = 1.0
_END_SECONDS = 5.0  # for a write that is under way


@contextmanager
def reported(what: str, live: bool = True) -> Iterator[None]:
    """Show that ``what`` goes on until the block ends, however it ends; nothing is written afterwards.

    On a terminal a line with the elapsed time appears at once and disappears at the end. Elsewhere
    ``WHAT: 40 s so far`` is logged after ten seconds and then every thirty. A thread does it: the block is not slowed.

    Args:
        live: False logs lines on a terminal, too.
    """
    reporter = _Reporter(what, live and sys.stderr.isatty())
    try:
        reporter.start()
        yield
    finally:
        reporter.stop()


class _Reporter(threading.Thread):
    """Writes until ``stop``, which returns when the last word is written."""

    def __init__(self, what: str, live: bool) -> None:
        super().__init__(name="progress", daemon=True)
        self._what, self._live = what, live
        self._going, self._wake = True, threading.Event()

    def run(self) -> None:
        if self._live:
            self._tick()
        else:
            self._log()

    def stop(self) -> None:
        self._going = False  # first, as a signal's handler may raise in the calls that follow
        self._wake.set()
        if self.ident is not None:
            self.join(_END_SECONDS)

    def _over_after(self, seconds: float) -> bool:
        return self._wake.wait(seconds) or not self._going

    def _tick(self) -> None:
        with tqdm(desc=self._what, bar_format="{desc} [{elapsed}]", leave=False) as line:
            while not self._over_after(_TICK_SECONDS):
                line.refresh()

    def _log(self) -> None:
        begin, pause = time.perf_counter(), FIRST_LINE_SECONDS
        while not self._over_after(pause):
            logger.info("%s: %.0f s so far", self._what, time.perf_counter() - begin)
            pause = LINE_SECONDS
