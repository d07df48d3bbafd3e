"""Processes of a run that are killed, and a disk that is full: what the run says, leaves behind and goes on from."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
from end_to_end_support import ROOT, Run

from verl.trainer.ppo.trainer_checkpoint import load_state
from verl.utils.checkpoint.step_folder import TRACKER_FILE

ENDLESS = [
    "trainer.total_training_steps=1000",
    "trainer.save_freq=1",
    "trainer.max_actor_ckpt_to_keep=2",
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
]
EMBEDDED = ROOT / "agent_system/environments/env_package/webshop/embedded_model"
MOST_BYTES = 1 << 20  # of a file: less than the shards of a rank, more than its logs


def saved_step(folder: Path) -> int:
    """The step that the tracker file names, after a look at its checkpoint; no other must be half there."""
    step = int((folder / TRACKER_FILE).read_text())
    assert load_state(folder / f"global_step_{step}").dataloader is not None
    assert (folder / f"global_step_{step}" / "actor" / "dist_ckpt" / ".metadata").is_file()
    assert not [path.name for path in folder.rglob("*") if ".tmp" in path.name]
    return step


def last_line(run: Run) -> str:
    return run.output.rstrip().splitlines()[-1]


@pytest.mark.slow
def test_killed_processes_and_a_full_disk(tmp_path):
    with Run(tmp_path, "run", *ENDLESS) as run:
        run.wait_for(lambda: run.has_logged(1))
        run.environment_hosts()[0].kill()
        logged = last_logged(run)
        run.wait_for(lambda: run.has_logged(logged + 2))
        assert "is replaced" in run.output  # the host; training goes on

        time.sleep(0.3)  # into the next step
        run.rank(1).kill()
        assert run.end() == 1
        assert "The run failed: actor_rollout rank 1 failed in " in last_line(run)
        assert "its process is gone" in last_line(run) and "goes on from the newest checkpoint" in last_line(run)
        assert not run.wait_until_gone()
    first = saved_step(run.folder)

    with Run(tmp_path, "run", *ENDLESS, "actor_rollout_ref.rollout.name=hf") as run:
        run.wait_for(lambda: run.has_logged(first + 1))
        assert f"global_step_{first}: step {first} of" in run.output.replace("\n", " ")
        run.rank(0).rlimit(psutil.RLIMIT_FSIZE, (MOST_BYTES, MOST_BYTES))
        assert run.end() == 1
        assert " failed in save_checkpoint" in last_line(run) and ": CheckpointWriteError: the checkpoint " in last_line(run)
        assert "trainer.default_local_dir" in last_line(run)
        assert not run.wait_until_gone()
    second = saved_step(run.folder)
    assert second > first

    with Run(tmp_path, "run", *ENDLESS, "actor_rollout_ref.rollout.name=hf") as run:
        run.wait_for(lambda: run.has_logged(second + 1))
        run.process.kill()
        assert not run.wait_until_gone()
    steps = [json.loads(line)["step"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, steps[-1] + 1))  # each step once, in spite of all that


def last_logged(run: Run) -> int:
    return json.loads((run.folder / "metrics.jsonl").read_text().rstrip().splitlines()[-1])["step"]


@pytest.mark.recipes  # what the driver does then is in tests/trainer/test_start_order.py
def test_a_driver_that_cannot_go_on_ends_the_ranks_that_start(tmp_path):
    path = tmp_path / "tasks.py"
    path.write_text("class Tasks:\n    pass\n")
    custom = [f"data.custom_cls.path={path}", "data.custom_cls.name=Tasks", "trainer.n_gpus_per_node=2"]
    with Run(tmp_path, "run", *custom) as run:
        assert run.end() == 1
        assert last_line(run) == (
            "The run failed: ValueError: data.custom_cls.name=Tasks must be a subclass of torch.utils.data.Dataset"
        )
        assert not run.wait_until_gone()


def test_a_rank_that_cannot_start_is_named_and_ends_the_run(tmp_path):
    library = tmp_path / "library.py"
    library.write_text("import os\nif os.environ.get('RANK') == '1':\n    raise KeyError('a package of this rank')\n")
    with Run(tmp_path, "run", f"actor_rollout_ref.model.external_lib={library}", "trainer.n_gpus_per_node=2") as run:
        assert run.end() == 1
        assert "The run failed: WorkerDict rank 1 failed in __init__" in last_line(run)
        assert "library.py fails with KeyError: 'a package of this rank'" in last_line(run)
        assert not run.wait_until_gone()


def test_a_finished_run_started_again_ends_before_anything_starts(tmp_path):
    (tmp_path / "run" / "global_step_4").mkdir(parents=True)
    (tmp_path / "run" / TRACKER_FILE).write_text("4")
    record = tmp_path / "run" / "resolved_config.yaml"
    record.write_text("actor_rollout_ref: {actor: {optim: {lr: 0.125}}}")
    with Run(tmp_path, "run", "trainer.total_epochs=3") as run:  # of one step each
        assert run.end() == 0, run.output[-3000:]
        assert "0.125" in record.read_text() and "with other values" not in run.output  # nothing goes on
        assert "nothing left to train: step 4 of 3 is done; raise trainer.total_epochs or" in last_line(run)
        assert "starting Ray" not in run.output and not (run.folder / "metrics.jsonl").exists()
        assert not run.wait_until_gone()


@pytest.mark.recipes
def test_a_finished_run_whose_data_tell_the_steps_late_ends_before_models_load(tmp_path):
    (tmp_path / "run" / "global_step_4").mkdir(parents=True)
    (tmp_path / "run" / TRACKER_FILE).write_text("4")
    (tmp_path / "own.py").write_text(
        "from verl.utils.dataset.rl_dataset import RLHFDataset\nclass Tasks(RLHFDataset):\n    pass\n"
    )
    record = tmp_path / "run" / "resolved_config.yaml"
    record.write_text("actor_rollout_ref: {actor: {optim: {lr: 0.125}}}")
    overrides = [f"data.custom_cls.path={tmp_path}/own.py", "data.custom_cls.name=Tasks", "trainer.total_epochs=4"]
    with Run(tmp_path, "run", *overrides) as run:
        assert run.end() == 0, run.output[-3000:]
        assert "nothing left to train: step 4 of 4 is done" in run.output and "Traceback" not in run.output
        assert "0.125" in record.read_text() and "with other values" not in run.output
        assert not (run.folder / "metrics.jsonl").exists()
        assert not run.wait_until_gone()


NEVER_READY = """
import functools, time
from agent_system.environments.registry import register_environment
from agent_system.environments.session_host import SessionPool

@register_environment("vast_shop")
def make_vast_shop(config):
    pool = SessionPool(functools.partial(time.sleep, 4 * 3600), num_hosts=2, start_limit_s=4 * 3600)
    pool.wait_until_built()
"""


def test_a_rank_that_cannot_load_ends_a_run_whose_environments_take_hours(tmp_path):
    library, model = tmp_path / "library.py", tmp_path / "model"
    library.write_text(NEVER_READY)
    shutil.copytree(EMBEDDED, model)
    (model / "model.safetensors").write_bytes(b"not weights")
    overrides = [f"actor_rollout_ref.model.external_lib={library}", f"actor_rollout_ref.model.path={model}"]
    with Run(tmp_path, "run", *overrides, "env.env_name=vast_shop", "trainer.n_gpus_per_node=1") as run:
        assert run.end() == 1, run.output[-3000:]
        assert "The run failed: actor_rollout rank 0 failed in init_model" in last_line(run), last_line(run)
        assert str(model) in last_line(run)
        assert not run.wait_until_gone()


def test_a_run_that_is_stopped_while_its_ranks_start_leaves_nothing(tmp_path):
    with Run(tmp_path, "run", "trainer.n_gpus_per_node=2") as run:
        run.wait_for(lambda: run.processes(RANK="1"))
        os.killpg(run.process.pid, signal.SIGTERM)  # what comes to the driver's group comes to the driver alone
        assert run.end() == 143, run.output[-3000:]
        assert "SIGTERM: stopping at once; checkpoints written so far are whole" in run.output
        assert "Traceback" not in run.output and "***" not in run.output
        assert not run.wait_until_gone()
