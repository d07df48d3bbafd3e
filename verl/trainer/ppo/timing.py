"""The ledger of one training step: every second belongs to exactly one phase."""
from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepTimer:
    """Times the phases of a step; what no phase claims is ``other``.

    Phases may not nest, so that their sum never exceeds the step. Use one timer a step::

        timer = StepTimer()
        with timer.phase("gen"):
            ...
        seconds = timer.finish()   # {"gen": 12.1, "other": 0.02, "step": 12.12}
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._open: str | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time spent inside to ``name`` (added up when the phase is entered again)."""
        assert self._open is None, f"phase {name!r} starts inside phase {self._open!r}: seconds would count twice"
        self._open = name
        begin = time.perf_counter()
        try:
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
