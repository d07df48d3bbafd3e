"""Whole runs of the program in processes of their own, and a look at everything they start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
MARK = "VERL_TEST_RUN"  # every process of a run inherits it in its environment
SMALL = [
    "preset=embedded",
    "algorithm.adv_estimator=gigpo",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "data.train_batch_size=2",
    "data.val_batch_size=4",
    "env.rollout.n=2",
    "env.max_steps=4",
    "trainer.logger=[console]",
    "trainer.save_freq=2",
    "trainer.test_freq=2",
]


def arguments(tmp_path: Path, run: str, *overrides: str) -> list[str]:
    """The command line of a run in ``tmp_path/run``; the parquet shells are written once."""
    data = tmp_path / "text"
    if not data.is_dir():
        prepare = ["-m", "examples.data_preprocess.prepare", "--mode", "text", "--local_dir", str(tmp_path)]
        subprocess.run(
            [sys.executable, *prepare, "--train_data_size", "2", "--val_data_size", "4"], cwd=ROOT, check=True
        )
    folder = tmp_path / run
    files = [f"data.train_files={data}/train.parquet", f"data.val_files={data}/test.parquet"]
    places = [f"trainer.default_local_dir={folder}", f"trainer.run_dir={folder}"]
    return [sys.executable, "-m", "verl.trainer.main_ppo", *SMALL, *files, *places, *overrides]


class Run:
    """A run that goes on while the test looks at it; use as a context manager, which leaves no process behind."""

    def __init__(self, tmp_path: Path, run: str, *overrides: str) -> None:
        self.folder = tmp_path / run
        self._output = tmp_path / f"{run}-{uuid.uuid4().hex[:6]}.txt"
        self._mark = uuid.uuid4().hex
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                arguments(tmp_path, run, *overrides),
                cwd=ROOT,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, MARK: self._mark, "OMP_NUM_THREADS": "1"},
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for process in [self.process, *self.processes()]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()

    @property
    def output(self) -> str:
        """What it has written to the terminal so far."""
        return self._output.read_text(errors="replace")

    def processes(self, **variables: str) -> list[psutil.Process]:
        """Processes of the run that are alive, those with these environment variables."""
        wanted = {MARK: self._mark, **variables}
        found = []
        for process in psutil.process_iter():
            try:
                if wanted.items() <= process.environ().items() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.AccessDenied, psutil.NoSuchProcess, OSError):
                continue
        return found

    def rank(self, number: int) -> psutil.Process:
        """The worker process of a rank."""
        (process,) = [one for one in self.processes(RANK=str(number)) if "WorkerDict" in _title(one)]
        return process

    def environment_hosts(self) -> list[psutil.Process]:
        """The processes that hold environment sessions."""
        return [one for one in self.processes() if "SessionHost" in _title(one)]

    def wait_for(self, condition: Callable[[], object], seconds: float = 240) -> None:
        """Until ``condition`` holds; fails with the run's output if it ends before, or takes too long."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output[-4000:]
            time.sleep(0.1)

    def has_logged(self, step: int) -> bool:
        """Whether ``metrics.jsonl`` has the line of a step."""
        metrics = self.folder / "metrics.jsonl"
        lines = metrics.read_text().splitlines(keepends=True) if metrics.is_file() else []
        return any(json.loads(line)["step"] >= step for line in lines if line.endswith("\n"))

    def end(self, seconds: float = 240) -> int:
        """Wait for the end; returns the exit code."""
        return self.process.wait(timeout=seconds)

    def wait_until_gone(self, seconds: float = 60) -> list[psutil.Process]:
        """Processes that are still there after ``seconds``."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        return ""
