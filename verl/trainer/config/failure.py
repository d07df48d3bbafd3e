"""What a person reads when a run has failed: the traceback once, and a last line that says it all."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

PRODUCT = Path(__file__).resolve().parents[3]
_PACKAGES = tuple(str(PRODUCT / name) for name in ("verl", "agent_system", "gigpo", "examples"))
_GOES_ON = "the same command goes on from the newest checkpoint (trainer.save_freq)"
_AFTER_A_LOSS = (
    "If the kernel's log (dmesg) shows that memory ran out, use smaller micro-batches, the offload keys of fsdp_config "
    f"or fewer env.num_workers; {_GOES_ON}."
)
_FILE = re.compile(r'^ *File "([^"]+)"', re.MULTILINE)
_FULL = re.compile(r"No space left on device|Disk quota exceeded|local disk's utilization is over capacity")
_ROOM = "make room"  # in a message that names the disk itself
_AFTER_A_FULL_DISK = (
    " (make room on the disks of trainer.run_dir, trainer.default_local_dir and the temporary folders, which TMPDIR "
    "and RAY_TMPDIR move; the same command goes on from the newest checkpoint)"
)


def failure_report(error: BaseException) -> str:
    """The text for standard error.

    An error of a worker carries the traceback from over there, which stands for the driver's. A ``ValueError`` that the
    product raised, here or there, is about what the user gave: its message names the key, and no traceback is shown.
    Anything else comes with the driver's traceback. Notes of an error, such as the key whose code raised it, follow its
    message. Errors are told apart by their attributes, since Ray is not imported here.
    """
    remote = getattr(error, "remote_traceback", None)
    if remote is not None:  # a WorkerError: its first line has role, rank and method
        first, *details = str(error).splitlines()
        if getattr(error, "worker_died", False):
            cause_is_known = _ROOM in first
            advice = f"; {_GOES_ON}." if cause_is_known else f". {_AFTER_A_LOSS}"
            return _joined("\n".join(details), first + advice)
        if isinstance(getattr(error, "cause", None), ValueError) and _is_ours((_FILE.findall(remote) or [""])[-1]):
            return _joined("", str(error).split("\n--- traceback")[0])
        return _joined(remote, first)
    cause = getattr(error, "cause", None)
    if type(error).__module__.startswith("ray.") and isinstance(cause, BaseException):  # raised in another Ray actor
        return _joined(str(error), f"{type(cause).__name__}: {cause}")
    line = f"{type(error).__name__}: {error}" + "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    if isinstance(error, ValueError) and _raised_by_us(error.__traceback__):
        return _joined("", line)
    return _joined("".join(traceback.format_exception(error)), line)


@contextmanager
def noted(note: str) -> Iterator[None]:
    """Around a user's code: what it raises gets ``note``, which says the key that brought it in.

    A ``ValueError`` of the product names its key itself.
    """
    try:
        yield
    except Exception as error:
        if not (isinstance(error, ValueError) and _raised_by_us(error.__traceback__)):
            error.__notes__ = [*getattr(error, "__notes__", ()), note]
        raise


def _joined(trace: str, line: str) -> str:
    if _FULL.search(line) and _ROOM not in line:
        line += _AFTER_A_FULL_DISK
    return (trace.rstrip() + "\n\n" if trace.strip() else "") + f"The run failed: {line}\n"


def _raised_by_us(trace: TracebackType | None) -> bool:
    frames = traceback.extract_tb(trace)
    return bool(frames) and _is_ours(frames[-1].filename)


def _is_ours(file: str) -> bool:
    return file.startswith(_PACKAGES) and "site-packages" not in file
