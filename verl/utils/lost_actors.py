"""Why a Ray actor is gone, or cannot start, as far as its error and this machine tell."""

from __future__ import annotations

import os
import re
from pathlib import Path

import ray
from ray.exceptions import RayActorError, RayError

__all__ = [
    "constructor_failed",
    "full_ray_disk",
    "last_exception_in",
    "loss_cause",
    "plain_text",
    "unusable_ray_folder",
]

# With less than this left, a process that Ray starts may find no room for its log files: it dies before it has run a
# line of the actor's, and its error says nothing but that the connection is gone.
_LEAST_FREE_BYTES = 16 * 2**20

_FOLDER_VARIABLES = ("RAY_TMPDIR", "TMPDIR")  # where Ray puts its folder: the first that is set, else /tmp
_LONGEST_SOCKET = 107  # bytes of a path that a Unix socket can have

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
    folder = _first_that_exists(folder)
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free >= _LEAST_FREE_BYTES and (disk.f_favail > 0 or disk.f_files == 0):  # some file systems count no files
        return None
    left = f"{free / 2**20:.1f} MiB" if free < _LEAST_FREE_BYTES else "no inodes"
    return (
        f"the disk under Ray's folder {folder} is full ({left} left); make room there, or set RAY_TMPDIR to a folder "
        "with a short path on another disk"
    )


def unusable_ray_folder() -> str | None:
    """Why a Ray of our own cannot start in the folder that it would take, and what to do; None if it can.

    Ray itself would wait in vain (a relative path, a full disk) or say nothing of the variable to change. One that is
    set to nothing is taken out of the environment: Ray would take it for a relative path.
    """
    for name in _FOLDER_VARIABLES:
        if os.environ.get(name) == "":
            del os.environ[name]
    key = next((name for name in _FOLDER_VARIABLES if os.environ.get(name)), "")
    said = f"{key}={os.environ[key]}" if key else "/tmp"
    folder = _coming_ray_folder()
    socket = folder / f"session_2000-01-01_00-00-00_000000_{os.getpid()}" / "sockets" / "plasma_store"
    excess = len(os.fsencode(socket)) - _LONGEST_SOCKET
    existing = _first_that_exists(folder)
    if key and not os.path.isabs(os.environ[key]):
        why = "is not an absolute path"
    elif excess > 0:
        why = f"is {excess} bytes too long for the paths of Ray's sockets"
    elif not existing.is_dir():
        why = f"holds no folder of Ray's: {existing} is a file"
    elif not os.access(existing, os.W_OK | os.X_OK):
        why = f"holds no folder of Ray's: {existing} cannot be written to"
    else:
        return full_ray_disk()
    return f"{said} {why}; set RAY_TMPDIR to a folder with a short path"


def _coming_ray_folder() -> Path:
    given = next(filter(None, map(os.environ.get, _FOLDER_VARIABLES)), "/tmp")
    return Path(given).absolute() / "ray"


def _first_that_exists(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there and can be looked at."""
    return next(one for one in (folder, *folder.parents) if os.path.exists(one))


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
