"""The ledgers of time: of one training step, whose every second belongs to exactly one phase, and of the start-up."""
from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import psutil

from verl.utils.progress import reported


class StepTimer:
    """Times the phases of a step; what no phase claims is ``other``.

    Phases may not nest, so that their sum never exceeds the step. Use one timer a step::

        timer = StepTimer()
        with timer.phase("gen"):
            ...
        seconds = timer.finish()   # {"gen": 12.1, "other": 0.02, "step": 12.12}

    A phase shows that it runs, see ``reported``.

    Args:
        title: what the phases belong to, such as ``step 3``.
        progress_bar: whether a terminal may have moving lines.
    """

    def __init__(self, title: str = "step", progress_bar: bool = True) -> None:
        self._title, self._progress_bar = title, progress_bar
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._open: str | None = None

    @contextmanager
    def phase(self, name: str, has_bar: bool = False) -> Iterator[None]:
        """Charge the time spent inside to ``name`` (added up when the phase is entered again).

        Args:
            has_bar: it shows a progress bar of its own, where the run has such.
        """
        assert self._open is None, f"phase {name!r} starts inside phase {self._open!r}: seconds would count twice"
        self._open = name
        begin = time.perf_counter()
        shown_elsewhere = has_bar and self._progress_bar
        try:
            with nullcontext() if shown_elsewhere else reported(f"{self._title}: {name}", self._progress_bar):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begin
            self._open = None

    def finish(self) -> dict[str, float]:
        """Seconds by phase, with ``step`` (all of it) and ``other`` (what no phase claimed)."""
        step = time.perf_counter() - self._start
        seconds = dict(self._seconds)
        seconds["other"] = step - sum(self._seconds.values())
        seconds["step"] = step
        return seconds


class StartupLedger:
    """Seconds of the parts of a start as ``startup/*``.

    Parts run side by side, here and on the ranks, so they do not add up. Marks count from the start of this process.

    Args:
        progress_bar: whether a terminal may have moving lines that say what is waited for.
    """

    def __init__(self, progress_bar: bool = True) -> None:
        self._progress_bar = progress_bar
        self._seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str, doing: str) -> Iterator[None]:
        """Charge the time spent inside to ``startup/<name>``; shows that it runs as ``start: <doing>``."""
        begin = time.perf_counter()
        try:
            with reported(f"start: {doing}", self._progress_bar):
                yield
        finally:
            self._seconds[f"startup/{name}"] = time.perf_counter() - begin

    def add(self, reports: Iterable[Mapping[str, float] | None]) -> None:
        """What ranks report of their own start (seconds by ``startup/*``); of each entry the longest counts."""
        for report in reports:
            for key, seconds in (report or {}).items():
                self._seconds[key] = max(self._seconds.get(key, 0.0), seconds)

    def mark(self, name: str) -> None:
        """Record the age of this process as ``startup/<name>``."""
        self._seconds[f"startup/{name}"] = process_age()

    def seconds(self) -> dict[str, float]:
        return dict(self._seconds)

    def __str__(self) -> str:
        parts = (f"{key.removeprefix('startup/')} {seconds:.1f}" for key, seconds in self._seconds.items())
        return ", ".join(parts)


def process_age() -> float:
    """Seconds since this process started, to a hundredth.

    On Linux psutil counts from the boot in whole seconds, and so is wrong by up to one.
    """
    if sys.platform != "linux":
        return time.time() - psutil.Process().create_time()
    after_name = Path("/proc/self/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc_pid_stat(5), since the boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
