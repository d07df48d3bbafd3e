"""The wheel holds the three packages with their data; the set-up script knows when it has nothing to do."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("verl/", "agent_system/", "gigpo/")


@pytest.fixture
def setup_env(tmp_path: Path, monkeypatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "scripts" / "setup_env.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "STAMP", tmp_path / ".venv" / "setup-stamp")
    monkeypatch.setattr(module, "LOG", tmp_path / ".venv" / "setup.log")
    for name in ("PYTHON", "VERL_SETUP_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    return module


@pytest.mark.slow
def test_the_wheel_holds_every_tracked_file_of_the_packages(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z", *PACKAGES, "setup.py", "pyproject.toml", "README.md", "LICENSE",
                             "requirements.txt", "requirements"],
                            cwd=ROOT, capture_output=True, timeout=300, check=False)
    names = [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]
    if not names:
        pytest.skip("not a git checkout")
    source = tmp_path / "source"  # a copy, so that the build leaves nothing behind
    for name in names:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path), "."],
                   cwd=source, timeout=300, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    assert [name for name in names if name.startswith(PACKAGES) and name not in held] == []
    assert "verl/trainer/config/preset/embedded.yaml" in held and "verl/version/version" in held
    assert {name.split("/")[0] for name in held if ".dist-info" not in name} == {"verl", "agent_system", "gigpo"}


def test_the_device_follows_the_machine(setup_env: ModuleType, tmp_path: Path, monkeypatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for script, device in (("echo 'GPU 0: x'", "cuda"), ("exit 9", "cpu"), ("echo 'No devices were found'", "cpu")):
        tool.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        tool.chmod(0o755)
        assert setup_env.find_device() == device
    monkeypatch.setenv("VERL_SETUP_DEVICE", "cuda")
    assert setup_env.find_device() == "cuda"
    monkeypatch.setenv("VERL_SETUP_DEVICE", "tpu")
    with pytest.raises(SystemExit):
        setup_env.find_device()


def test_a_second_run_does_nothing(setup_env: ModuleType, monkeypatch, capsys) -> None:
    monkeypatch.setenv("VERL_SETUP_DEVICE", "cpu")
    python = setup_env.venv_python()
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    setup_env.STAMP.write_text(setup_env.stamp("cpu"), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["setup_env.py"])
    assert setup_env.main() == 0
    assert capsys.readouterr().out == ""
    assert setup_env.stamp("cpu") != setup_env.stamp("cuda")


def test_an_unsupported_python_is_refused_with_what_is_supported(setup_env: ModuleType, monkeypatch, capsys) -> None:
    monkeypatch.setattr(setup_env, "version_of", lambda python: (3, 13))
    with pytest.raises(SystemExit):
        setup_env.find_python()
    assert "supported are 3.10, 3.11, 3.12" in capsys.readouterr().err
    monkeypatch.setenv("PYTHON", "/usr/bin/python3.13")
    with pytest.raises(SystemExit):
        setup_env.find_python()
    assert "PYTHON=/usr/bin/python3.13 is Python 3.13" in capsys.readouterr().err


def test_torch_comes_from_the_cpu_index_where_pip_does_not_find_it(setup_env: ModuleType, monkeypatch) -> None:
    tried: list[list[str]] = []

    def fails_first(name: str, arguments: list[str]) -> bool:
        tried.append(arguments)
        return len(tried) == 2

    monkeypatch.setattr(setup_env, "try_step", fails_first)
    setup_env.install_torch_cpu()
    assert "--index-url" not in tried[0] and setup_env.TORCH_CPU_INDEX in tried[1]
    assert all("--timeout" in one for one in tried)
    monkeypatch.setattr(setup_env, "try_step", lambda name, arguments: False)
    with pytest.raises(SystemExit):
        setup_env.install_torch_cpu()


def test_a_failed_or_endless_step_is_reported(setup_env: ModuleType, monkeypatch, capsys) -> None:
    python = setup_env.venv_python()
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho the reason\nexit 1\n", encoding="utf-8")
    python.chmod(0o755)
    with pytest.raises(SystemExit):
        setup_env.step("things", ["x"])
    assert "the reason" in capsys.readouterr().err
    python.write_text("#!/bin/sh\nexec sleep 60\n", encoding="utf-8")
    monkeypatch.setenv("VERL_SETUP_TIMEOUT", "0.5")
    assert not setup_env.try_step("things", ["x"])
    assert "took longer than" in capsys.readouterr().out
