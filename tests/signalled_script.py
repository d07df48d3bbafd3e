"""A shell script that a signal ends, and with it what it started."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

SIGNALS = [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]  # each with the script's exit code


def end_by_signal(script: Path, environment: Mapping[str, str], started: Path, sent: signal.Signals, code: int) -> int:
    """Sends a signal to a running script, which has to exit with ``code`` and leave no process behind.

    Args:
        started: the file to which every process that the script starts adds its number.

    Returns:
        How many processes it had started.
    """
    process = subprocess.Popen(
        ["bash", str(script)], env=environment, stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(sent, signal.SIG_DFL),  # ignored in a session in the background or of nohup
    )  # fmt: skip
    try:
        _wait_for(lambda: started.exists() and started.read_text().strip())
        process.send_signal(sent)
        assert process.wait(timeout=60) == code
        numbers = started.read_text().split()
        _wait_for(lambda: not any(Path(f"/proc/{number}").exists() for number in numbers))
        return len(numbers)
    finally:
        process.kill()


def _wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)
