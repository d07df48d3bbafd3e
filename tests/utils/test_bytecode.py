"""Bytecode is kept in the cache folder where an environment keeps none, and only there."""

from __future__ import annotations

import compileall
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl.utils.bytecode import keep_bytecode

PACKAGE = "a_library_without_bytecode"


@pytest.fixture()
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that can be imported, in an environment that writes no bytecode; its folder."""
    folder = tmp_path / "site" / PACKAGE
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("answer = 6 * 7\n")
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "put back after the test")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return folder


def unchanged() -> bool:
    return sys.pycache_prefix is None and "PYTHONPYCACHEPREFIX" not in os.environ


def test_what_is_kept_nowhere_is_kept_in_the_cache_by_this_process_and_its_children(
    package: Path, tmp_path: Path
) -> None:
    keep_bytecode(str(tmp_path / "cache"), ["no_such_library", PACKAGE])
    kept = tmp_path / "cache" / "bytecode"
    assert sys.pycache_prefix == str(kept)
    assert not sys.dont_write_bytecode
    command = [sys.executable, "-c", f"import {PACKAGE} as one; print(one.answer, one.__cached__)"]
    output = subprocess.run(command, cwd=package.parent, check=True, capture_output=True, text=True, timeout=60).stdout
    answer, cached = output.split()
    assert answer == "42"
    assert Path(cached).is_relative_to(kept) and Path(cached).is_file()
    assert not (package / "__pycache__").exists()


def test_an_environment_that_has_bytecode_or_writes_it_itself_stays_as_it_is(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = str(tmp_path / "cache")
    with monkeypatch.context() as writes:
        writes.setattr(sys, "dont_write_bytecode", False)
        keep_bytecode(cache, [PACKAGE])
        assert unchanged()
    compileall.compile_dir(package, quiet=1)
    keep_bytecode(cache, [PACKAGE])
    assert unchanged()
    assert sys.dont_write_bytecode
    assert not Path(cache).exists()


def test_the_users_own_folder_and_no_folder_hold(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_bytecode(None, [PACKAGE])
    assert unchanged()
    monkeypatch.setattr(sys, "pycache_prefix", "/their/own")
    keep_bytecode(str(tmp_path / "cache"), [PACKAGE])
    assert sys.pycache_prefix == "/their/own"
    assert sys.dont_write_bytecode


def test_a_folder_that_cannot_be_made_is_said(
    package: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file")
    with caplog.at_level(logging.WARNING):
        keep_bytecode(str(tmp_path / "cache"), [PACKAGE])
    assert f"none can be kept in {tmp_path}/cache/bytecode (Not a directory)" in caplog.text
    assert unchanged()
