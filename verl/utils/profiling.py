"""Where a call spends its time: a short text under torch.profiler instead of a trace of hundreds of megabytes.

A device that is busy for a small part of the wall time waits for the host: launches, hooks of FSDP, Python. Where
``stream synchronise`` holds the missing seconds it is the host that waits. The profiler itself slows the host: compare
shares, and take seconds from a run without it.
"""

from __future__ import annotations

import errno
import gzip
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger(__name__)

TOP = 25
GAPS = 15  # longest waits of the GPU that are listed
THREADS = 8  # busiest threads of the process that are listed
# What is counted on the host: a name in the report, and the events that belong to it.
COUNTED = {
    "kernel_launches": ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"),
    "copies": ("cudaMemcpyAsync", "cudaMemcpy", "cudaMemsetAsync"),
    "stream_synchronise": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
    "item": ("aten::item",),
    "fsdp_hooks": ("FSDP::pre_*", "FSDP::post_*"),  # with the copies and collectives they start
    "malloc": ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cuMemCreate", "cuMemMap"),
}
ON_ANY_DEVICE = ("item", "fsdp_hooks")  # the other groups are calls of CUDA


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of ``spans`` (begin and end, microseconds) runs.

    >>> busy_seconds([(0, 4e6), (2e6, 5e6), (7e6, 8e6)])
    6.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total / 1e6


def longest_gaps(spans: Iterable[tuple[float, float]], count: int = GAPS) -> list[tuple[float, float]]:
    """The longest times between the first and the last of ``spans`` in which none runs, in the order of time.

    >>> longest_gaps([(0, 4), (2, 5), (7, 8), (9, 10)], count=1)
    [(5, 7)]
    """
    gaps, reached = [], None
    for begin, end in sorted(spans):
        if reached is not None and begin > reached:
            gaps.append((reached, begin))
        reached = end if reached is None else max(reached, end)
    return sorted(sorted(gaps, key=lambda gap: gap[0] - gap[1])[:count])


def host_events_in(gap: tuple[float, float], events: Sequence[tuple[float, float, str]], count: int = 4) -> list[str]:
    """What the host did in a gap: names of the events that cover most of it, leaving out those far longer than it.

    >>> host_events_in((5, 7), [(0, 100, "step"), (5, 6.5, "clip"), (6.5, 9, "forward"), (20, 21, "later")])
    ['clip', 'forward']
    """
    begin, end = gap
    shares: dict[str, float] = {}
    for first, last, name in events:
        overlap = min(last, end) - max(first, begin)
        if overlap > 0 and last - first < 10 * (end - begin):
            shares[name] = max(shares.get(name, 0.0), overlap)
    return sorted(shares, key=lambda name: -shares[name])[:count]


def count_events(averages: Sequence[Any]) -> dict[str, tuple[int, float]]:
    """How often each group of ``COUNTED`` was called, and its seconds on the host.

    Args:
        averages: entries with ``key``, ``count`` and ``cpu_time_total`` (microseconds), as of ``key_averages()``.
    """
    found = {}
    for group, events in COUNTED.items():
        own = [entry for entry in averages if any(fnmatchcase(entry.key, event) for event in events)]
        found[group] = (sum(entry.count for entry in own), sum(entry.cpu_time_total for entry in own) / 1e6)
    return found


def thread_seconds() -> dict[int, float]:
    """Seconds of CPU that each thread of this process has used, by its id in the operating system."""
    return {thread.id: thread.user_time + thread.system_time for thread in psutil.Process().threads()}


def thread_name(number: int) -> str:
    """Name of a thread of this process: Python's if it is one of Python's, or else the operating system's."""
    for thread in threading.enumerate():
        if thread.native_id == number:
            return thread.name
    try:
        return Path(f"/proc/self/task/{number}/comm").read_text(encoding="utf-8").strip()
    except OSError:  # it ended, or this is no Linux
        return f"thread {number}"


def _busiest_threads(before: dict[int, float], after: dict[int, float]) -> list[str]:
    used = {number: seconds - before.get(number, 0.0) for number, seconds in after.items()}
    busiest = sorted((number for number in used if used[number] > 0), key=lambda number: -used[number])[:THREADS]
    return [f"{thread_name(number):<32}{used[number]:>8.2f}" for number in busiest]


def profile_call(
    call: Callable[[], Any], path: Path, title: str, device: torch.device, trace: bool = False
) -> dict[str, float]:
    """Run ``call`` once under the profiler and write what it did to ``path``.

    Args:
        call: should have run before: compilation and the first allocations are not of interest.
        path: text file to write; with ``trace`` also a Chrome trace beside it, ``.json.gz``. A folder that does not let
            itself be written to is a warning: other ranks wait for this one in their next collective.
        title: first line of the file.
        device: where the call computes; its kernels are recorded too if that is CUDA.

    Returns:
        ``wall_s``, ``cuda_busy_s``, and for each group of ``COUNTED`` its calls and ``…_s``.
    """
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        before = thread_seconds()
        begin = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize(device)
        wall = time.perf_counter() - begin
        threads = _busiest_threads(before, thread_seconds())
    averages = profiler.key_averages()
    counts = count_events(averages)
    kernels, host = _spans(profiler.events())
    busy = busy_seconds(kernels)
    lines = [title, f"{'wall s':<20}{wall:>12.4f}"]
    lines += [f"{'cuda busy s':<20}{busy:>12.4f} ({busy / wall:.0%})"] if cuda else []
    lines += [
        f"{group.replace('_', ' '):<20}{calls:>12,}  {seconds:.4f} s on the host"
        for group, (calls, seconds) in counts.items()
        if cuda or group in ON_ANY_DEVICE
    ]
    lines += _waits(kernels, host) if kernels else []
    lines += ["", "The busiest threads of the process, seconds of CPU", *threads]
    orders = {"time on the host without children": "self_cpu_time_total"}
    if cuda:
        orders["time on the GPU"] = "self_cuda_time_total"
    for words, order in orders.items():
        lines += ["", f"The {TOP} largest by {words}", averages.table(order, TOP, max_name_column_width=64)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        if trace:
            _write_trace(profiler, path.with_suffix(".json.gz"))
    except OSError as error:
        logger.warning("the profile could not be written as %s: %s", path, error)
    figures = {"wall_s": round(wall, 4), "cuda_busy_s": round(busy, 4)}
    for group, (calls, seconds) in counts.items():
        figures |= {group: calls, f"{group}_s": round(seconds, 4)}
    return figures


def _write_trace(profiler: profile, path: Path) -> None:
    """Write a compressed Chrome trace; OSError if the disk is full.

    ``export_chrome_trace`` only logs that it could not write, and compressing by itself it takes the temporary folder.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="trace.") as folder:
        plain = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(plain))
        if not plain.is_file():
            raise OSError(errno.ENOSPC, "the trace could not be written, is the disk full?", str(path))
        with plain.open("rb") as source, gzip.open(path, "wb") as target:
            shutil.copyfileobj(source, target)


def _spans(events: Iterable[Any]) -> tuple[list[tuple[float, float]], list[tuple[float, float, str]]]:
    """Begin and end of all kernels, and with names of what ran on the host."""
    kernels, host = [], []
    for event in events:
        begin, end = event.time_range.start, event.time_range.end
        if event.device_type == DeviceType.CPU:
            host.append((begin, end, event.name))
        elif not event.is_user_annotation:
            kernels.append((begin, end))
    return kernels, host


def _waits(kernels: list[tuple[float, float]], host: list[tuple[float, float, str]]) -> list[str]:
    """Lines of the longest waits between kernels."""
    first, gaps = min(kernels)[0], longest_gaps(kernels)
    lines = ["", f"The {len(gaps)} longest waits of the GPU: at ms, for ms, and what the host did"]
    return lines + [
        f"{(gap[0] - first) / 1e3:>9.1f} {(gap[1] - gap[0]) / 1e3:>8.2f}  {', '.join(host_events_in(gap, host))}"
        for gap in gaps
    ]
