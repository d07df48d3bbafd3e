"""Folders that cannot be written to are named before anything starts."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from verl.trainer.config import ConfigError, default_config, folders
from verl.trainer.config.folders import hold_run_folder, make_folders


def test_folders_are_made_and_left_empty(tmp_path: Path) -> None:
    make_folders(default_config(f"trainer.run_dir={tmp_path}/a/b", f"trainer.default_local_dir={tmp_path}/c", "trainer.save_freq=1"))
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["a", "a/b", "c"]


@pytest.mark.parametrize("key", ["trainer.run_dir", "trainer.default_local_dir", "trainer.rollout_data_dir"])
@pytest.mark.parametrize("place", ["/dev/null/run", "/proc/run", "FILE/run"])
def test_a_folder_that_cannot_be_made_is_named_with_its_key(tmp_path: Path, key: str, place: str) -> None:
    (tmp_path / "file").touch()
    place = place.replace("FILE", str(tmp_path / "file"))
    places = {"trainer.run_dir": tmp_path / "run", "trainer.default_local_dir": tmp_path / "run", key: place}
    with pytest.raises(ConfigError) as caught:
        make_folders(default_config("trainer.save_freq=1", *(f"{name}={value}" for name, value in places.items())))
    assert str(caught.value).startswith(f"{key}={place}: ") and "use another folder" in str(caught.value)


def test_a_disk_with_room_for_a_part_of_the_logs_is_full(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    config = default_config(f"trainer.run_dir={tmp_path}")
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # as if that were what is left
    try:
        with pytest.raises(ConfigError, match=f"trainer.run_dir={tmp_path}: .*make room"):
            make_folders(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    make_folders(config)


@contextmanager
def _held_by_another(folder: Path) -> Iterator[None]:
    other = (
        "import sys; from verl.trainer.config.folders import hold_run_folder; "
        f"hold_run_folder('trainer.run_dir', {str(folder)!r}); print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", other], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield
    finally:
        process.kill()
        process.communicate()


def test_a_run_folder_belongs_to_one_run_at_a_time(tmp_path: Path) -> None:
    with _held_by_another(tmp_path), pytest.raises(ConfigError, match="another run is writing to this folder"):
        hold_run_folder("trainer.run_dir", tmp_path, patience=0.0)
    hold_run_folder("trainer.run_dir", tmp_path)  # a run that was killed holds nothing
    hold_run_folder("trainer.run_dir", tmp_path)  # and a process does not lock itself out
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_of_a_running_run_are_read_by_others_and_written_by_none(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(folders, "_PATIENCE_SECONDS", 0.0)
    shared = tmp_path / "checkpoints"
    shared.mkdir()
    places = [f"trainer.run_dir={tmp_path}/other", f"trainer.default_local_dir={shared}"]
    with _held_by_another(shared):
        make_folders(default_config(*places, "trainer.val_only=true"))
        with pytest.raises(ConfigError, match=f"trainer.default_local_dir={shared}: another run"):
            make_folders(default_config(*places))  # a signal would have it save
