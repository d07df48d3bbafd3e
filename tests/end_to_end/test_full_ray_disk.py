"""A full disk under Ray's folder is named wherever a process is lost to it. A real one, mounted for one program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from end_to_end_support import ROOT

PRIVATE_MOUNTS = ["unshare", "--user", "--map-root-user", "--mount"]
MOUNT = 'mount -t tmpfs -o size=40m tmpfs "$0" && exec "$@"'


@pytest.fixture()
def folder() -> Iterator[Path]:
    """A folder with a short path, as Ray's sockets need it."""
    with tempfile.TemporaryDirectory(prefix="full-", dir="/tmp") as name:
        yield Path(name)


def may_mount(folder: Path) -> bool:
    if shutil.which(PRIVATE_MOUNTS[0]) is None:
        return False
    return subprocess.run([*PRIVATE_MOUNTS, "sh", "-c", MOUNT, folder, "true"], capture_output=True).returncode == 0


def test_a_full_disk_under_ray_is_named_with_what_to_do(folder: Path) -> None:
    if not may_mount(folder):
        pytest.skip("a disk of one's own cannot be mounted here")
    program = [sys.executable, ROOT / "tests/end_to_end/full_ray_disk.py", folder]
    done = subprocess.run(
        [*PRIVATE_MOUNTS, "sh", "-c", MOUNT, folder, *program],
        capture_output=True, text=True, timeout=150, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    for moment in ("building", "playing", "rank", "start"):
        assert f"the disk under Ray's folder {folder}/ray is full (0.0 MiB left); make room there" in said[moment]
        assert "set RAY_TMPDIR to a folder" in said[moment]
        assert "out of memory" not in said[moment] and "dmesg" not in said[moment]
    assert said["building"].startswith("an environment process ended while it was being built: ")
    assert said["rank"].startswith("The run failed: Worker rank 0 failed in __init__: ActorDiedError: its process is gone: ")
    assert said["rank"].endswith("the same command goes on from the newest checkpoint (trainer.save_freq).")
    assert said["processes that ran before"] == "True"
    assert not list(folder.iterdir())
