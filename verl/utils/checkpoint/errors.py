"""What a user reads when a checkpoint cannot be written or read."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

__all__ = ["CheckpointWriteError", "explained_read", "explained_write"]

# The words of the writers of torch (C++ streams), safetensors and tokenizers, which raise no OSError. torch's writer
# says how far it got ("unexpected pos 704 vs 598") in place of the system's error, when it is closed after that.
_DISK = re.compile(
    r"no space left|file too large|quota exceeded|read-only file system|input/output error|I/O error"
    r"|PytorchStreamWriter|inline_container|iostream error|basic_ios",
    re.IGNORECASE,
)
_DISK_NUMBERS = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM}


class CheckpointWriteError(ValueError):
    """The folder of the checkpoints does not take what is written; an older checkpoint is as it was."""


@contextmanager
def explained_write(folder: Path) -> Iterator[None]:
    """Errors of the disk inside the block become one that names the folder and its free space.

    What was written of ``folder`` by then is removed. Other errors pass, torch's ``CheckpointException`` (which is no
    ``Exception``) as a ``RuntimeError``.

    Raises:
        CheckpointWriteError: the disk is full, or a limit on files or the user's rights forbid to write.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        reason = _disk_trouble(error)
        if reason is not None:
            shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointWriteError(
                f"the checkpoint {folder} could not be written ({reason}; {_free_space(folder)}); make room or give "
                "trainer.default_local_dir on another disk. Checkpoints written before are whole, and the same command "
                "goes on from the newest"
            ) from error
        if isinstance(error, CheckpointException):
            raise RuntimeError(f"the checkpoint {folder} could not be written: {_causes(error)[0]}") from error
        raise


@contextmanager
def explained_read(folder: Path) -> Iterator[None]:
    """Errors inside the block become one that names the checkpoint, the first cause, and what can be done.

    Raises:
        ValueError: a file is missing or damaged, or holds another model's state.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        cause = _causes(error)[0]
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise ValueError(
            f"the checkpoint {folder} cannot be read: {reason}; docs/checkpoints.md says how to go on from an older "
            "one, and trainer.resume_mode=disable starts afresh"
        ) from error


def _causes(error: BaseException) -> list[BaseException]:
    """The errors behind an error: those of each rank of a ``CheckpointException``, then what they came from."""
    ranks = error.failures.values() if isinstance(error, CheckpointException) else ()
    found = [failure[0] for failure in ranks] or [error]
    for one in found:
        before = one.__cause__ or one.__context__
        if before is not None and before not in found:
            found.append(before)
    return found


def _disk_trouble(error: BaseException) -> str | None:
    """What the disk said, in one line; None where it is not the disk."""
    causes = _causes(error)
    for one in causes:
        if isinstance(one, OSError) and one.errno in _DISK_NUMBERS:
            return str(one.strerror)
    for one in causes:
        if _DISK.search(str(one)):
            return str(one).strip().splitlines()[0]
    return None


def _free_space(folder: Path) -> str:
    place = next((parent for parent in folder.absolute().parents if parent.exists()), Path("/"))
    return f"{shutil.disk_usage(place).free / 1e9:.2f} GB are free there"
