"""The script of two GPUs refuses what it cannot use before it starts anything, and names it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/two_gpu.sh"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("STAGES", "update stock", "STAGES: there is no stage stock; use some of stock_tp2 "),
        ("GPUS", "0", "GPUS=0 has to be a whole number, at least 1"),
        ("STEPS", "few", "STEPS=few has to be a whole number, at least 1"),
        ("LIMIT", "-5", "LIMIT=-5 has to be a whole number, at least 1"),
        ("OUT", "{folder}/file/out", "file/out has to be a folder that can be written to"),
    ],
)
def test_a_wrong_argument_is_named(tmp_path: Path, name: str, value: str, said: str) -> None:
    (tmp_path / "file").touch()
    settings = {"TINY": "yes", "OUT": str(tmp_path / "out"), "TMPDIR": str(tmp_path), "STAGES": "update"}
    settings[name] = value.format(folder=tmp_path)
    done = subprocess.run(
        ["bash", str(SCRIPT)], env={**os.environ, **settings}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 64, done.stdout
    assert said in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
