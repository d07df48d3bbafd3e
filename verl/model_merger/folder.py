"""A folder that appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from verl.utils.fs import open_to_readers


@contextlib.contextmanager
def staged_folder(target: Path, needed_bytes: int) -> Iterator[Path]:
    """A temporary folder beside ``target`` that is renamed to it at the end of the block; removed if the block raises.

    Args:
        target: must not exist, or be empty.
        needed_bytes: what will be written at least.

    Raises:
        ValueError: the target holds something, cannot be written, or the disk is too small; also when it fills up
            inside the block.
    """
    target = target.expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"--target_dir {target} is not empty; remove it or give another folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < needed_bytes:
            raise ValueError(
                f"--target_dir {target}: {needed_bytes / 2**30:.2f} GiB are needed, {free / 2**30:.2f} GiB are free "
                "there; make room or give a folder on another disk"
            )
        staging = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
        staging.mkdir()
    except OSError as error:
        raise ValueError(f"--target_dir {target} cannot be written: {error}") from error
    try:
        yield staging
        open_to_readers(staging, "*")
        os.replace(staging, target)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if _disk_is_full(error):
            raise ValueError(
                f"--target_dir {target}: the disk is full; nothing was kept. Make room or give another folder"
            ) from error
        raise


def _disk_is_full(error: BaseException) -> bool:
    """Whether an error, or what it came from, is a full disk; libraries in other languages say so in words alone."""
    seen: BaseException | None = error
    while seen is not None:
        if getattr(seen, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
