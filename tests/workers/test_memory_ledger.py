"""The memory ledger: what a border reads, peaks of phases and of the run, and which rank's reading counts."""

from __future__ import annotations

import pytest
import torch

from tests.workers.ranks import run_ranks
from verl.workers import memory_ledger as ledger

CUDA = torch.device("cuda", 0)
GIB = 2**30


class Counters:
    """A device of 16 GiB, 1 of them other processes', and torch's counters of it, in whole GiB."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.most_allocated = self.most_reserved = 0

    def hold(self, allocated: int) -> None:
        """Allocate or free; as torch does, blocks once taken stay reserved."""
        self.allocated = allocated
        self.reserved = max(self.reserved, allocated)
        self.most_allocated = max(self.most_allocated, allocated)
        self.most_reserved = max(self.most_reserved, self.reserved)

    def reset(self, device: torch.device) -> None:
        self.most_allocated, self.most_reserved = self.allocated, self.reserved

    def empty_cache(self) -> None:
        self.reserved = self.allocated


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Counters:
    made = Counters()
    for name, read in {
        "mem_get_info": lambda device: ((15 - made.reserved) * GIB, 16 * GIB),
        "memory_allocated": lambda device: made.allocated * GIB,
        "memory_reserved": lambda device: made.reserved * GIB,
        "max_memory_allocated": lambda device: made.most_allocated * GIB,
        "max_memory_reserved": lambda device: made.most_reserved * GIB,
        "reset_peak_memory_stats": made.reset,
    }.items():
        monkeypatch.setattr(torch.cuda, name, read)
    monkeypatch.setattr(ledger, "_noted", {})
    monkeypatch.setattr(ledger, "_peaks_before", {"allocated": 0, "reserved": 0})
    return made


def read(border: str) -> dict[str, float]:
    prefix = f"perf/memory_gb/{border}/"
    readings = ledger.memory_ledger(CUDA, border)
    assert all(key.startswith(prefix) for key in readings)
    return {key.removeprefix(prefix): value for key, value in readings.items()}


def test_each_phase_has_its_own_peak_and_the_run_keeps_the_largest(counters: Counters) -> None:
    for held in (2, 9, 3):
        counters.hold(held)
    assert read("old_log_prob") == {"allocated": 3, "reserved": 9, "used": 10, "free": 6, "peak": 9}
    counters.empty_cache()
    for held in (5, 1):
        counters.hold(held)
    assert read("ref") == {"allocated": 1, "reserved": 5, "used": 6, "free": 10, "peak": 5}
    assert read("values")["peak"] == 1, "nothing was allocated since"
    totals = ledger.memory_metrics(CUDA)
    assert (totals["perf/max_memory_allocated_gb"], totals["perf/max_memory_reserved_gb"]) == (9, 9)
    counters.hold(12)
    totals = ledger.memory_metrics(CUDA)
    assert (totals["perf/max_memory_allocated_gb"], totals["perf/max_memory_reserved_gb"]) == (12, 12), "in a phase"


def on_one_rank_of_two() -> tuple[dict[str, float], dict[str, float]]:
    rank = torch.distributed.get_rank()
    ledger._noted.update({"perf/memory_gb/ref/peak": [3.0, 5.0][rank], "perf/memory_gb/ref/free": [7.0, 4.0][rank]})
    first = ledger.memory_of_phases(torch.device("cpu"))
    ledger.note_memory(torch.device("cpu"), "update_actor")
    return first, ledger.memory_of_phases(torch.device("cpu"))


def test_the_rank_with_the_most_in_use_counts_and_a_reading_once() -> None:
    for first, second in run_ranks(on_one_rank_of_two, 2):
        assert first == {"perf/memory_gb/ref/peak": 5.0, "perf/memory_gb/ref/free": 4.0}
        assert list(second) == ["perf/memory_gb/update_actor/rss"]
