"""What is said of an actor that is gone; a disk that is really full: tests/end_to_end/test_full_ray_disk.py."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl.utils.lost_actors import full_ray_disk, last_exception_in, loss_cause


def disk(monkeypatch: pytest.MonkeyPatch, **figures: int) -> list[Path]:
    """Gives every folder a disk with these figures; returns the folders that were asked about."""
    asked: list[Path] = []
    figures = {"f_bavail": 10**6, "f_frsize": 4096, "f_files": 1000, "f_favail": 10, **figures}
    monkeypatch.setattr(os, "statvfs", lambda folder: asked.append(folder) or SimpleNamespace(**figures))
    return asked


def test_a_disk_is_full_without_bytes_or_without_inodes(monkeypatch: pytest.MonkeyPatch) -> None:
    disk(monkeypatch)
    assert full_ray_disk() is None
    assert loss_cause() == "killed from outside, out of memory, or crashed"
    disk(monkeypatch, f_bavail=2**10)
    assert loss_cause() == full_ray_disk() and "(4.0 MiB left)" in loss_cause()
    disk(monkeypatch, f_favail=0)
    assert "(no inodes left)" in loss_cause()
    disk(monkeypatch, f_favail=0, f_files=0)  # btrfs counts none
    assert full_ray_disk() is None


def test_before_ray_runs_its_folder_is_where_it_will_make_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = disk(monkeypatch)
    (tmp_path / "ray").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    full_ray_disk()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "not" / "yet"))
    full_ray_disk()
    assert asked == [tmp_path / "ray", tmp_path]


def test_the_exception_of_a_traceback_is_told_with_all_its_lines() -> None:
    trace = 'Traceback\n  File "x.py", line 1, in f\n    y\nverl.errors.BadThing: first\nsecond\n'
    assert last_exception_in(trace) == ("BadThing", "first\nsecond")
    assert last_exception_in("its node is gone") == ("ActorDiedError", "its node is gone")
