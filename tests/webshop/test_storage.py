"""Files of a built catalogue: round trips, damage, and one builder per machine."""

from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_system.environments.env_package.webshop import storage
from agent_system.environments.env_package.webshop.session import load_shop
from agent_system.environments.env_package.webshop.storage import (
    ArrayWriter,
    DamagedFilesError,
    FileLock,
    TextColumn,
    TextColumnWriter,
    open_array,
    open_or_build,
    read_manifest,
)


def _build(folder: Path) -> dict:
    with (folder.parent / "builds").open("a") as handle:
        handle.write("x")
    storage.save_array(folder, "numbers", np.arange(1000))
    column = TextColumnWriter(folder, "words")
    for word in ("one", "", "three"):
        column.append(word)
    column.close()
    return {"answer": 42}


def _builds(root: Path) -> int:
    return (root / "builds").stat().st_size


def _open(root: Path) -> tuple[Path, dict]:
    return open_or_build(root, "key", _build, 30, "a test")


def test_array_writer_is_numpy_format(tmp_path: Path) -> None:
    for values in (np.arange(0), np.arange(7), np.arange(100_000)):
        writer = ArrayWriter(tmp_path / "a.npy", np.int32)
        writer.append(values[:3])
        writer.append(values[3:])
        writer.close()
        loaded = np.load(tmp_path / "a.npy")
        assert loaded.dtype == np.int32
        np.testing.assert_array_equal(loaded, values)
        np.testing.assert_array_equal(open_array(tmp_path, "a"), values)


@settings(max_examples=30, deadline=None)
@given(texts=st.lists(st.text(max_size=20), max_size=30))
def test_text_column_round_trip(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("column")
    writer = TextColumnWriter(folder, "t")
    for text in texts:
        writer.append(text)
    writer.close()
    assert list(TextColumn(folder, "t")) == texts


def test_built_once_then_opened(tmp_path: Path) -> None:
    folder, manifest = _open(tmp_path)
    assert manifest["answer"] == 42
    assert _open(tmp_path) == (folder, manifest)
    assert _builds(tmp_path) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["builds", "key", "key.lock"]


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "manifest", "empty manifest"])
@pytest.mark.parametrize("large", [False, True])
def test_damage_is_rebuilt(damage: str, large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if large:  # large folders are checked in full only when a file has changed since
        monkeypatch.setattr(storage, "_ALWAYS_CHECK_BELOW", 0)
    folder, _ = _open(tmp_path)
    victim = folder / "numbers.npy"
    if damage == "flip":
        data = bytearray(victim.read_bytes())
        data[-5] ^= 1
        victim.write_bytes(data)
    elif damage == "cut":
        os.truncate(victim, 500)
    elif damage == "missing":
        victim.unlink()
    elif damage == "manifest":
        (folder / "manifest.json").write_text("{")
    else:
        (folder / "manifest.json").write_text("{}")
    with pytest.raises(DamagedFilesError):
        read_manifest(folder)
    folder, manifest = _open(tmp_path)
    assert manifest["answer"] == 42
    np.testing.assert_array_equal(open_array(folder, "numbers"), np.arange(1000))
    assert _builds(tmp_path) == 2


def test_large_folder_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_ALWAYS_CHECK_BELOW", 0)
    folder, _ = _open(tmp_path)
    monkeypatch.setattr(storage, "file_crc", lambda path: pytest.fail("read a checked file again"))
    read_manifest(folder)


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> dict:
        (folder / "half.npy").write_text("x")
        raise ValueError("bad record")

    with pytest.raises(ValueError, match="bad record"):
        open_or_build(tmp_path, "key", fail, 30, "a test")
    assert [p.name for p in tmp_path.iterdir()] == ["key.lock"]


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> dict:
        (folder / "half.npy").write_text("x")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ValueError, match="a test could not be built in env.webshop.cache_dir=.*No space left"):
        open_or_build(tmp_path, "key", fail, 30, "a test")
    assert [p.name for p in tmp_path.iterdir()] == ["key.lock"]
    with FileLock(tmp_path / "key.lock", 1, "first"), pytest.raises(TimeoutError):
        open_or_build(tmp_path, "key", fail, 0.1, "a test")


def test_leftovers_of_a_killed_builder_are_removed(tmp_path: Path) -> None:
    (tmp_path / "key.building-999999").mkdir(parents=True)
    (tmp_path / "key.building-999999" / "half.npy").write_text("x")
    _open(tmp_path)
    assert not (tmp_path / "key.building-999999").exists()


def test_leftovers_of_other_names_go_when_their_builder_is_gone(tmp_path: Path) -> None:
    for name in ("gone", "alive"):
        (tmp_path / f"{name}.building-999999").mkdir(parents=True)
    with FileLock(tmp_path / "alive.lock", 1, "building"):
        _open(tmp_path)
    assert not (tmp_path / "gone.building-999999").exists() and (tmp_path / "alive.building-999999").exists()


def _build_without_end(root: str) -> None:
    def build(folder: Path) -> dict:
        (folder / "half.npy").write_text("x")
        (Path(root) / "started").touch()
        time.sleep(60)
        return {}

    open_or_build(Path(root), "key", build, 30, "a test")


def test_a_killed_builder_hinders_nobody(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_build_without_end, args=(str(tmp_path),))
    process.start()
    deadline = time.monotonic() + 30
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline and process.is_alive()
        time.sleep(0.01)
    with pytest.raises(TimeoutError):
        open_or_build(tmp_path, "key", _build, 0.05, "a test")
    process.kill()
    process.join(30)
    folder, _ = _open(tmp_path)
    np.testing.assert_array_equal(open_array(folder, "numbers"), np.arange(1000))
    assert not list(tmp_path.glob("*.building-*"))


@pytest.mark.parametrize("limit", [100, 5_000, 20_000, 45_000])
def test_a_limit_on_file_sizes_is_an_error_that_names_the_folder(limit: int, tmp_path: Path) -> None:
    """Whichever file meets it, from the first texts (100 bytes) to the goal list; and the next build is whole."""
    code = (
        "import resource, sys;"
        "from agent_system.environments.env_package.webshop.session import load_shop;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY));\n"
        "try: load_shop(num_products=200, cache_dir=sys.argv[1])\n"
        "except ValueError as error: print(error)"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path), str(limit)]
    found = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert f"could not be built in env.webshop.cache_dir={tmp_path} ([Errno 27] File too large)" in found.stdout
    assert not list(tmp_path.glob("*.building-*"))
    assert len(load_shop(num_products=200, cache_dir=str(tmp_path)).catalogue) == 200


def test_the_disk_is_asked_for_the_index_before_it_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapped file that the disk has no room for would end the process with a signal."""

    def no_room(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(ValueError, match="env.webshop.cache_dir=.*No space left"):
        load_shop(num_products=20, cache_dir=str(tmp_path))


def test_a_built_catalogue_opens_from_a_folder_nobody_can_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = load_shop(num_products=40, cache_dir=str(tmp_path))
    names = sorted(tmp_path.iterdir())
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # what a user who is not root would be told
    opened = load_shop(num_products=40, cache_dir=str(tmp_path))
    assert opened.split == built.split and sorted(tmp_path.iterdir()) == names
    with pytest.raises(ValueError, match="env.webshop.cache_dir=.* cannot be written to, and the catalogue"):
        load_shop(num_products=41, cache_dir=str(tmp_path))


def _slow_build(folder: Path) -> dict:
    time.sleep(0.3)
    return _build(folder)


def _open_slowly(root: str) -> int:
    folder, manifest = open_or_build(Path(root), "key", _slow_build, 30, "a test")
    return manifest["answer"] + int(open_array(folder, "numbers")[-1])


def test_only_one_process_builds(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        assert pool.map(_open_slowly, [str(tmp_path)] * 4) == [42 + 999] * 4
    assert _builds(tmp_path) == 1


def test_waiting_has_a_limit(tmp_path: Path) -> None:
    with FileLock(tmp_path / "l", 1, "first"), pytest.raises(TimeoutError, match="env.webshop.build_timeout"):
        with FileLock(tmp_path / "l", 0.2, "building the catalogue"):
            pytest.fail("two holders")
    with FileLock(tmp_path / "l", 0.2, "free again"):
        pass


def test_cache_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="env.webshop.cache_dir"):
        _open(tmp_path / "file" / "cache")
