"""Costs of a step that no result shows: an allocator that has to start over, code that is compiled once more."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

_ALLOCATOR = {"num_alloc_retries": "perf/memory_alloc_retries", "num_device_alloc": "perf/memory_device_allocs"}


class StepCosts:
    """Counts since the last reading, the largest over ranks, because the slowest rank holds up all others.

    ``perf/memory_alloc_retries``: how often the device had no memory left, so that torch handed back everything it
    kept for later and tried again; each costs tenths of a second. ``perf/memory_device_allocs``: how often it asked the
    device for memory. ``perf/compiled_graphs`` and ``perf/compile_s``: graphs that torch.compile traced, and seconds
    that this and generating code took. Steps after the second should show neither retries nor graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._before = self._totals()

    def metrics(self) -> dict[str, float]:
        """The counts, which begin anew. Collective."""
        totals = self._totals()
        since = [totals[name] - self._before[name] for name in totals]
        self._before = totals
        largest = torch.tensor(since, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return dict(zip(totals, largest.tolist()))

    def _totals(self) -> dict[str, float]:
        """Counts of this process since its start, under the same names on every rank."""
        stats = torch.cuda.memory_stats(self.device) if self.device.type == "cuda" else {}
        totals = {name: float(stats.get(key, 0)) for key, name in _ALLOCATOR.items()}
        graphs, seconds = _compilations()
        return totals | {"perf/compiled_graphs": graphs, "perf/compile_s": seconds}


def _compilations() -> tuple[float, float]:
    """Graphs compiled in this process so far, and seconds spent on them; no process imports a compiler for it."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0.0, 0.0
    return float(dynamo.counters["stats"]["unique_graphs"]), dynamo.calculate_time_spent().get("total_wall_time", 0.0)
