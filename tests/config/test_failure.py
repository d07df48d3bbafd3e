"""How a failed run ends: exit code 1, one traceback, a last line that says it all, nothing of Hydra's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl.trainer.config.compose import compose
from verl.trainer.config.convert import to_dataclass
from verl.trainer.config.failure import failure_report, noted
from verl.trainer.ppo.reward import get_custom_reward_fn

ROOT = Path(__file__).resolve().parents[2]
ENTRY = """
from verl.trainer.config import command_line, failure, hydra_main
command_line._ready = lambda composition: True

@hydra_main
def main(config):
    raise KeyError("lost")

main()
"""


class RemoteError(RuntimeError):
    """As the error of a worker: a first line with role, rank and method, and the traceback from over there."""

    remote_traceback = "Traceback (over there)\n  line 3"


def test_a_workers_error_shows_its_own_traceback_once() -> None:
    try:
        raise RemoteError("actor rank 1 failed in init_model: OSError: gone\n--- traceback ---\nline 3")
    except RemoteError as error:
        report = failure_report(error)
    assert report.count("line 3") == 1
    assert report.endswith("The run failed: actor rank 1 failed in init_model: OSError: gone\n")
    assert __file__ not in report


def test_what_a_users_code_raises_says_which_key_brought_it_in() -> None:
    with pytest.raises(KeyError) as error, noted("from env.env_name=shop"), noted("from a file"):
        raise KeyError("lost")
    assert failure_report(error.value).endswith("The run failed: KeyError: 'lost' (from a file) (from env.env_name=shop)\n")


def test_what_the_product_refuses_names_its_key_itself() -> None:
    with pytest.raises(ValueError) as error, noted("from env.env_name=shop"):
        get_custom_reward_fn(to_dataclass(compose(["preset=embedded", "custom_reward_function.path=none.py"]).config))
    assert failure_report(error.value) == (
        "The run failed: ValueError: custom_reward_function.path=none.py is not a file\n"
    )


@pytest.mark.parametrize(("place", "shown"), [("verl/workers/actor/x.py", 0), ("/usr/lib/python3/json.py", 1)])
def test_a_users_mistake_that_a_worker_finds_has_no_traceback(place: str, shown: int) -> None:
    class Refused(RemoteError):
        remote_traceback = f'Traceback (over there)\n  File "/ray/worker.py", line 1\n  File "{ROOT / place}", line 3'
        cause = ValueError("no room")

    report = failure_report(Refused(f"actor rank 0 failed in x: ValueError: no room\n--- traceback ---\n{place}"))
    assert report.count("Traceback") == shown
    assert report.endswith("The run failed: actor rank 0 failed in x: ValueError: no room\n")


def test_a_lost_worker_is_the_last_line_with_what_to_do() -> None:
    class Lost(RemoteError):
        remote_traceback = ""
        worker_died = True

    report = failure_report(Lost("actor rank 1 failed in rollout_step: ActorDiedError: gone\nWorker exit type: X"))
    details, _, line = report.rstrip().rpartition("\n\n")
    assert details == "Worker exit type: X"
    assert line.startswith("The run failed: actor rank 1 failed in rollout_step: ActorDiedError: gone. ")
    assert "the same command goes on from the newest checkpoint" in line


def test_a_worker_that_a_full_disk_cost_is_not_put_down_to_memory() -> None:
    class Lost(RemoteError):
        remote_traceback = ""
        worker_died = True

    (line,) = failure_report(Lost("actor rank 1 failed in x: ActorDiedError: the disk is full; make room there")).splitlines()
    assert line.endswith("make room there; the same command goes on from the newest checkpoint (trainer.save_freq).")


def test_a_full_disk_says_where_to_make_room() -> None:
    with pytest.raises(OSError) as full, Path("/dev/full").open("w") as file:
        file.write("x")
        file.flush()
    line = failure_report(full.value).rstrip().splitlines()[-1]
    assert line.startswith("The run failed: OSError: [Errno 28] No space left on device (make room on the disks of ")
    line = failure_report(RemoteError("the local disk's utilization is over capacity (95% by default)"))
    assert "RAY_TMPDIR" in line
    said = RemoteError("actor rank 1 failed in save_checkpoint: CheckpointWriteError: x (No space left on device); make room")
    assert failure_report(said).count("make room") == 1


def test_a_users_mistake_is_one_line_and_ours_has_a_traceback() -> None:
    config = compose(["preset=embedded"]).config
    config.trainer.total_epochs = "many"
    with pytest.raises(ValueError) as mistake:
        to_dataclass(config)
    assert failure_report(mistake.value).count("\n") == str(mistake.value).count("\n") + 1
    with pytest.raises(ValueError) as foreign:
        int("x")
    assert "Traceback" in failure_report(foreign.value)


def test_the_entry_point_ends_with_code_one_and_the_run_folder_may_be_in_the_home_folder(tmp_path: Path) -> None:
    script = tmp_path / "entry.py"
    script.write_text(ENTRY, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    command = [sys.executable, str(script), "preset=embedded", "trainer.run_dir='~/runs/a'"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment, check=False
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("The run failed: KeyError: 'lost'")
    assert done.stderr.count("Traceback") == 1
    assert "HYDRA_FULL_ERROR" not in done.stderr
    assert (tmp_path / "runs" / "a" / "entry.log").is_file()
