"""The script of two GPUs: what it refuses before it starts anything, how it ends, what it compares."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from benchmarks.update_phase import parse_arguments
from tests.signalled_script import SIGNALS, end_by_signal

SCRIPT = Path(__file__).parents[2] / "benchmarks/two_gpu.sh"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("STAGES", "update stock", "STAGES: there is no stage stock; use some of stock_tp2 "),
        ("STAGES", " ", "STAGES names no stage"),
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


@pytest.mark.parametrize(("sent", "code"), SIGNALS)
def test_a_signal_to_the_script_ends_its_stage(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    """SIGINT as from ``kill``, to the script alone; a terminal sends it to the stage as well."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "python3").write_text(f'#!/bin/sh\necho $$ >>{tmp_path}/started\nexec sleep 300\n')
    (tools / "python3").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "VIRTUAL_ENV": str(tools), "TINY": "yes"}
    environment |= {"OUT": str(tmp_path / "out"), "TMPDIR": str(tmp_path), "STAGES": "update\ntests"}
    stages = end_by_signal(SCRIPT, environment, tmp_path / "started", sent, code)
    assert stages == 1  # the stage after it did not begin


@pytest.mark.parametrize("tiny", ["", "yes"])
def test_the_update_is_measured_beside_plain_fsdp2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: str
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "python3").write_text(f'#!/bin/sh\n[ "$1" = -m ] && printf "%s\\n" "$@" >{tmp_path}/asked\nexit 0\n')
    (tools / "python3").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "VIRTUAL_ENV": str(tools), "TINY": tiny}
    environment |= {"OUT": str(tmp_path / "out"), "TMPDIR": str(tmp_path), "STAGES": "update"}
    subprocess.run(["bash", str(SCRIPT)], env=environment, check=True, capture_output=True, timeout=60)
    launcher, arguments = (tmp_path / "asked").read_text().split("benchmarks.update_phase\n")
    assert "--nproc-per-node\n2\n" in launcher
    monkeypatch.setattr("sys.argv", ["update_phase", *arguments.splitlines()])
    arms = parse_arguments().arms
    assert "plain" in arms and any(arm.startswith("fit") for arm in arms)
