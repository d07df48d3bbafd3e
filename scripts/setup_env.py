#!/usr/bin/env python3
"""Make ``.venv`` and install what the project needs, for the CPU or for CUDA, whichever the machine has.

A second run does nothing: a stamp in ``.venv`` holds a hash of the requirement files. Runs on any Python 3.8 or later;
the environment itself is made with Python 3.10, 3.11 or 3.12.

Environment variables:
    PYTHON: interpreter for the environment instead of the first suitable one.
    VERL_SETUP_DEVICE: ``cpu`` or ``cuda`` instead of what nvidia-smi says.
    VERL_SETUP_TIMEOUT: seconds that one installation step may take (default 3600).
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import List, NoReturn, Optional

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "setup-stamp"
LOG = VENV / "setup.log"
SUPPORTED = ((3, 10), (3, 11), (3, 12))
TORCH = "torch==2.13.0+cpu"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
HEARTBEAT_S = 15
QUICK = ["--timeout", "20", "--retries", "1"]  # for an index that may not answer


def main() -> int:
    """Entry point; returns the exit code."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    device = find_device()
    wanted = stamp(device)
    if STAMP.is_file() and STAMP.read_text(encoding="utf-8") == wanted and venv_python().exists():
        return 0
    started = time.time()
    say(f"setting up .venv for {device} (once; the log is .venv/setup.log)")
    make_venv()
    if device == "cpu":
        install_torch_cpu()
        step("packages", ["-r", "requirements/cpu.txt"])
        step("vLLM for CPU", ["--no-deps", "-r", "requirements/cpu-engine.txt"])
    else:
        step("packages and vLLM for CUDA (several GB)", ["-r", "requirements/gpu.txt"])
    step("test tools", ["-r", "requirements/dev.txt"])
    step("the project itself", ["--no-deps", "--no-build-isolation", "-e", "."])
    STAMP.write_text(wanted, encoding="utf-8")
    say(f"done in {time.time() - started:.0f} s")
    return 0


def find_device() -> str:
    """``cuda`` where nvidia-smi lists a GPU, else ``cpu``."""
    chosen = os.environ.get("VERL_SETUP_DEVICE")
    if chosen:
        if chosen not in ("cpu", "cuda"):
            fail(f"VERL_SETUP_DEVICE={chosen} has to be cpu or cuda")
        return chosen
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "cpu"
    try:
        listed = subprocess.run(
            [tool, "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "cpu"
    return "cuda" if listed.returncode == 0 and b"GPU" in listed.stdout else "cpu"


def stamp(device: str) -> str:
    """What the environment was made from, as one line."""
    files = [
        ROOT / "requirements.txt",
        *sorted((ROOT / "requirements").glob("*.txt")),
        ROOT / "setup.py",
        Path(__file__),
    ]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{device} {ROOT} {digest.hexdigest()}\n"


def make_venv() -> None:
    """Create ``.venv`` unless a usable one is there."""
    if venv_python().exists():
        version = version_of(str(venv_python()))
        if version in SUPPORTED:
            return
        fail(f".venv is made with Python {show(version)}, which is not supported; remove it and run this again")
    python = find_python()
    say(f"python {show(version_of(python))}: {python}")
    made = subprocess.run(
        [python, "-m", "venv", str(VENV)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if made.returncode:
        shutil.rmtree(VENV, ignore_errors=True)
        fail(
            f"{python} cannot make a virtual environment; on Debian and Ubuntu install python3-venv\n"
            + made.stdout.decode(errors="replace").strip()
        )


def find_python() -> str:
    """The interpreter for the environment: ``PYTHON``, the one that runs this, or one on the path."""
    given = os.environ.get("PYTHON")
    if given:
        version = version_of(given)
        if version is None:
            fail(f"PYTHON={given} does not run as a Python interpreter; supported are {supported()}")
        if version not in SUPPORTED:
            fail(f"PYTHON={given} is Python {show(version)}; supported are {supported()}")
        return given
    names = [sys.executable] + [f"python{major}.{minor}" for major, minor in reversed(SUPPORTED)]
    for name in names:
        path = shutil.which(name)
        if path and version_of(path) in SUPPORTED:
            return path
    fail(
        f"no suitable Python found: supported are {supported()}, this is {show(sys.version_info[:2])}. Install one "
        "of them, or name it with PYTHON=/path/to/python3.11"
    )


def version_of(python: str) -> Optional[tuple]:
    """``(major, minor)`` of an interpreter, None where it does not run."""
    code = "import sys; print(sys.version_info[0], sys.version_info[1])"
    try:
        out = subprocess.run(
            [python, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    major, minor = out.stdout.split()[:2]
    return int(major), int(minor)


def install_torch_cpu() -> None:
    """torch's CPU build: from where pip looks by itself, else from PyTorch's own index of CPU wheels."""
    if try_step("torch (CPU build)", [*QUICK, TORCH]):
        return
    if try_step(f"torch (CPU build) from {TORCH_CPU_INDEX}", [*QUICK, "--index-url", TORCH_CPU_INDEX, TORCH]):
        return
    fail(
        f"{TORCH} could not be installed: neither the package index set up for pip nor {TORCH_CPU_INDEX} has it for "
        f"this machine. See {LOG}. With the wheel in a folder, PIP_FIND_LINKS=/that/folder makes pip find it"
    )


def step(name: str, arguments: List[str]) -> None:
    """One installation step that has to succeed."""
    if not try_step(name, arguments):
        tail = LOG.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-12:]
        fail("installing " + name + f" failed; the end of {LOG}:\n  " + "\n  ".join(tail))


def try_step(name: str, arguments: List[str]) -> bool:
    """Run pip with progress lines and a time limit; True where it succeeded."""
    limit = float(os.environ.get("VERL_SETUP_TIMEOUT", "3600"))
    command = [str(venv_python()), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *arguments]
    started = last = time.time()
    say(f"installing {name} ...")
    with LOG.open("ab") as log:
        log.write(("\n$ " + " ".join(command) + "\n").encode())
        log.flush()
        process = subprocess.Popen(command, cwd=str(ROOT), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                time.sleep(0.2)
                now = time.time()
                if now - started > limit:
                    say(f"installing {name} took longer than {limit:.0f} s (VERL_SETUP_TIMEOUT); stopped")
                    return False
                if now - last > HEARTBEAT_S:
                    last = now
                    say(f"  {name}: {now - started:.0f} s")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    say(f"  {name}: {'installed' if process.returncode == 0 else 'failed'} after {time.time() - started:.0f} s")
    return process.returncode == 0


def venv_python() -> Path:
    """The environment's interpreter."""
    return VENV / "bin" / "python"


def supported() -> str:
    """The supported versions in words."""
    return ", ".join(show(version) for version in SUPPORTED)


def show(version: Optional[tuple]) -> str:
    """``3.11``."""
    return "unknown" if version is None else ".".join(str(part) for part in version)


def say(text: str) -> None:
    """A progress line."""
    sys.stdout.write(f"[setup] {text}\n")
    sys.stdout.flush()


def fail(text: str) -> NoReturn:
    """End with a message."""
    sys.stderr.write(f"[setup] {text}\n")
    sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
