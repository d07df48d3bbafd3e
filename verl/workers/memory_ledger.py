"""Memory at the borders between a step's phases, as ``perf/memory_gb/<border>/*``, and peaks of the run, in GiB.

Every role of a rank lives in one process, and torch counts for the process as a whole, so there is one ledger a
process. A rollout's borders are answers of their own (``HybridEngine``). Those of the training phases wait here
(``note_memory``) for the update that ends them, with whose metrics they travel (``memory_of_phases``): one collective,
and no call to the ranks of its own.

A border asks the driver and reads counters, and waits for nothing that the device still computes.
"""

from __future__ import annotations

import psutil
import torch
import torch.distributed as dist

_noted: dict[str, float] = {}  # readings of the phases since the last update
_peaks_before = {"allocated": 0, "reserved": 0}  # bytes, the most until the last border


def memory_ledger(device: torch.device, border: str) -> dict[str, float]:
    """Memory at ``border`` and the peak since the border before, GiB.

    Returns:
        On CUDA, under ``perf/memory_gb/<border>/``:

        - ``allocated``, ``reserved``: torch's, which count a rollout engine's pool even while it sleeps.
        - ``used``, ``free``: the driver's view of the device, to which blocks that torch keeps cached are in use; torch
          hands those back when it runs short.
        - ``peak``: the most that was ``allocated`` at once since the last border.

        On CPU ``rss`` alone, the memory of this process.
    """
    key = f"perf/memory_gb/{border}"
    if device.type != "cuda":
        return {f"{key}/rss": psutil.Process().memory_info().rss / 2**30}
    free, total = torch.cuda.mem_get_info(device)
    readings = {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "used": total - free,
        "free": free,
        "peak": torch.cuda.max_memory_allocated(device),
    }
    _peaks_before.update(_peaks(device))
    torch.cuda.reset_peak_memory_stats(device)
    return {f"{key}/{name}": value / 2**30 for name, value in readings.items()}


def note_memory(device: torch.device, phase: str) -> None:
    """A training phase ends: keep its ``memory_ledger`` for ``memory_of_phases``."""
    _noted.update(memory_ledger(device, phase))


def memory_of_phases(device: torch.device) -> dict[str, float]:
    """What was noted since the last call, of the rank with the most (``free``: the least). Collective."""
    readings = dict(_noted)
    _noted.clear()
    signs = [-1.0 if name.endswith("/free") else 1.0 for name in readings]
    worst = torch.tensor([sign * value for sign, value in zip(signs, readings.values())], dtype=torch.float64)
    worst = worst.to(device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return {name: sign * value for name, sign, value in zip(readings, signs, worst.tolist())}


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Peaks of this rank's GPU memory since its start (0 on CPU) and the host's memory in use, GiB, as ``perf/*``."""
    peaks = _peaks(device) if device.type == "cuda" else {"allocated": 0, "reserved": 0}
    return {
        "perf/max_memory_allocated_gb": peaks["allocated"] / 2**30,
        "perf/max_memory_reserved_gb": peaks["reserved"] / 2**30,
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used / 2**30,
    }


def _peaks(device: torch.device) -> dict[str, int]:
    """Bytes allocated and reserved at most since the start; torch's own peaks are those since the last border."""
    return {
        "allocated": max(_peaks_before["allocated"], torch.cuda.max_memory_allocated(device)),
        "reserved": max(_peaks_before["reserved"], torch.cuda.max_memory_reserved(device)),
    }
