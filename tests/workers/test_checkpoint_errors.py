"""What a checkpoint says when the disk does not take it."""

from __future__ import annotations

import errno
import os
import traceback
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from verl.utils.checkpoint.errors import CheckpointWriteError, explained_read, explained_write

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


def of_a_rank(error: Exception) -> CheckpointException:
    return CheckpointException("save", {1: (error, traceback.StackSummary())})


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device"),
        (OSError(errno.EFBIG, os.strerror(errno.EFBIG)), "File too large"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES)), "Permission denied"),
        (of_a_rank(OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))), "Disk quota exceeded"),
        (of_a_rank(RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed\nmore")), "data/0"),
        (of_a_rank(RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")), "704 vs 598"),
        (Exception("Error while serializing: I/O error: No space left on device (os error 28)"), "os error 28"),
    ],
)
def test_errors_of_the_disk_name_folder_reason_and_remedy(tmp_path, error, said):
    folder = tmp_path / "global_step_4.tmp"
    folder.mkdir()
    with pytest.raises(CheckpointWriteError) as caught, explained_write(folder):
        raise error
    text = str(caught.value)
    assert str(folder) in text and said in text and "trainer.default_local_dir" in text and "GB are free" in text
    assert "\n" not in text and not folder.exists()


@needs_full
def test_what_torch_raises_on_a_full_disk_is_known(tmp_path):
    with pytest.raises(CheckpointWriteError, match="could not be written"), explained_write(tmp_path / "x"):
        torch.save(torch.zeros(100_000), FULL)


def test_other_errors_pass(tmp_path):
    with pytest.raises(KeyError), explained_write(tmp_path):
        raise KeyError("mine")
    assert tmp_path.exists()
    with pytest.raises(RuntimeError, match="could not be written: no such key"), explained_write(tmp_path):
        raise of_a_rank(ValueError("no such key"))


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file or directory", "dist_ckpt/__1_0.distcp"),
        of_a_rank(FileNotFoundError(errno.ENOENT, "No such file or directory", "dist_ckpt/__1_0.distcp")),
        RuntimeError("PytorchStreamReader failed reading dist_ckpt/__1_0.distcp\nmore"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_names_file_and_remedy(tmp_path, error):
    with pytest.raises(ValueError, match="cannot be read") as caught, explained_read(tmp_path / "global_step_4"):
        raise error
    text = str(caught.value)
    assert "global_step_4" in text and "__1_0.distcp" in text and "trainer.resume_mode=disable" in text and "\n" not in text
