"""Why a Ray actor is gone, as far as its error and this machine tell."""

from __future__ import annotations

import os
import re
from pathlib import Path

import ray
from ray.exceptions import RayActorError, RayError

__all__ = ["constructor_failed", "full_ray_disk", "last_exception_in", "loss_cause", "plain_text"]

# With less than this left, a process that Ray starts may find no room for its log files: it dies before it has run a
# line of the actor's, and its error says nothing but that the connection is gone.
_LEAST_FREE_BYTES = 16 * 2**20

_ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_EXCEPTION_LINE = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?:: |$)(?P<message>.*)")

# What Ray makes of an error of arguments that cannot be read; the traceback of the error itself follows.
_AROUND_ANOTHER = ("RaySystemError", "traceback")


def loss_cause() -> str:
    """What may have ended a process of an actor: a full disk where there is one, else what it usually is."""
    return full_ray_disk() or "killed from outside, out of memory, or crashed"


def full_ray_disk() -> str | None:
    """That the disk under Ray's folder on this machine is full, and what to do; None if it is not.

    Before Ray runs it is the folder that a Ray of our own would take.
    """
    folder = Path(ray.get_runtime_context().get_temp_dir()) if ray.is_initialized() else _coming_ray_folder()
    while not folder.exists():
        folder = folder.parent
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free >= _LEAST_FREE_BYTES and (disk.f_favail > 0 or disk.f_files == 0):  # some file systems count no files
        return None
    left = f"{free / 2**20:.1f} MiB" if free < _LEAST_FREE_BYTES else "no inodes"
    return (
        f"the disk under Ray's folder {folder} is full ({left} left); make room there, or set RAY_TMPDIR to a folder "
        "with a short path on another disk"
    )


def _coming_ray_folder() -> Path:
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp").absolute() / "ray"


def constructor_failed(error: RayError) -> bool:
    """Whether an actor is dead because its constructor raised (Ray then keeps the text alone)."""
    return isinstance(error, RayActorError) and "creation task" in str(error)


def plain_text(error: RayError) -> str:
    """Its text without the colours that Ray gives it."""
    return _ANSI_COLOUR.sub("", str(error))


def last_exception_in(traceback_text: str) -> tuple[str, str]:
    """Type and message of the exception at the end of a formatted traceback."""
    lines = traceback_text.rstrip().splitlines()
    last_frame = max((i for i, line in enumerate(lines) if line.startswith('  File "')), default=-1)
    for index in range(last_frame + 1, len(lines)):
        match = _EXCEPTION_LINE.match(lines[index])
        kind = match["type"].rsplit(".", 1)[-1] if match else None
        if match and kind and kind not in _AROUND_ANOTHER:
            return kind, "\n".join([match["message"], *lines[index + 1 :]])
    return "ActorDiedError", traceback_text
