"""A run that goes on with other values says which."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.trainer.config import compose_config, to_dataclass
from verl.trainer.config.earlier_run import changed_values
from verl.trainer.config.prepare import to_yaml, write_resolved
from verl.trainer.config.schema import PPOTrainerConfig
from verl.trainer.ppo.trainer_checkpoint import CheckpointFolder
from verl.utils.checkpoint.step_folder import TRACKER_FILE


def _config(folder: Path, *overrides: str) -> PPOTrainerConfig:
    return to_dataclass(compose_config([f"trainer.default_local_dir={folder}", *overrides]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run that saved a checkpoint."""
    run = tmp_path / "run"
    write_resolved(to_yaml(_config(run, "algorithm.adv_estimator=gigpo", "env.rollout.n=8")), run)
    (run / "global_step_4").mkdir()
    (run / TRACKER_FILE).write_text("4")
    return run


SAME = ("algorithm.adv_estimator=gigpo", "env.rollout.n=8")


def test_keys_that_decide_what_is_trained_are_named_with_both_values(folder: Path) -> None:
    line = changed_values(_config(folder, "algorithm.adv_estimator=grpo", "env.rollout.n=2", "trainer.save_freq=7"))
    assert line is not None and str(folder) in line
    assert "algorithm.adv_estimator='grpo' (before: 'gigpo')" in line and "env.rollout.n=2 (before: 8)" in line
    assert "save_freq" not in line and "experiment_name" in line and "resume_mode=disable" in line


def test_what_counts_is_the_run_that_saved_not_one_that_ended_before_it_did(folder: Path) -> None:
    wrong = ("algorithm.adv_estimator=gigpo", "env.rollout.n=2")
    saved = CheckpointFolder(folder, 5)
    saved.save_config(_config(folder, *SAME))
    saved.commit(keep=None)
    for _ in range(2):  # what the first of them leaves in the run folder says nothing of the checkpoint
        line = changed_values(_config(folder, *wrong))
        assert line is not None and "env.rollout.n=2 (before: 8)" in line and f"checkpoint in {folder} with" in line
        write_resolved(to_yaml(_config(folder, *wrong)), folder)
    assert changed_values(_config(folder, *SAME)) is None


def test_many_are_counted(folder: Path) -> None:
    changes = [f"data.{key}={number}" for number, key in enumerate(("max_prompt_length", "train_batch_size", "seed"), 3)]
    changes += [f"actor_rollout_ref.actor.{key}=0.125" for key in ("clip_ratio", "kl_loss_coef", "entropy_coeff")]
    changes += ["algorithm.gamma=0.5", "algorithm.lam=0.5"]
    changes += ["actor_rollout_ref.actor.optim.lr=0.5", "critic.optim.weight_decay=0.5"]  # said here alone: never cut
    line = changed_values(_config(folder, *SAME, *changes))
    assert line is not None and line.count("(before: ") == 6 and " more. If" in line
    assert "actor_rollout_ref.actor.optim.lr=0.5 (before: " in line and "critic.optim.weight_decay=0.5 " in line


def test_nothing_is_said_of_the_same_run_made_longer(folder: Path) -> None:
    longer = ("trainer.total_epochs=99", "trainer.test_freq=3", "ray_init.num_cpus=2", "trainer.progress_bar=false")
    assert changed_values(_config(folder, *SAME, *longer)) is None


def test_nothing_is_said_where_nothing_goes_on(folder: Path, tmp_path: Path) -> None:
    other = ("algorithm.adv_estimator=grpo",)
    assert changed_values(_config(folder, *other, "trainer.resume_mode=disable")) is None
    assert changed_values(_config(tmp_path / "fresh", *other)) is None
    (folder / TRACKER_FILE).unlink()
    assert changed_values(_config(folder, *other)) is None


def test_the_folder_of_a_named_checkpoint_counts(folder: Path, tmp_path: Path) -> None:
    named = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/global_step_4")
    line = changed_values(_config(tmp_path / "next", *named, "algorithm.adv_estimator=grpo", "env.rollout.n=8"))
    assert line is not None and "adv_estimator" in line
    assert changed_values(_config(tmp_path / "next", *named, *SAME)) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- a list",
        "{no: yaml: at all",
        "algorithm: none",
        "algorithm: 2026-99-99",
        "algorithm: !!int none",
        "algorithm: &a {gamma: *a}",
        "[" * 5000,
    ],
)
def test_a_file_that_is_none_stops_nobody(folder: Path, text: str) -> None:
    (folder / "resolved_config.yaml").write_text(text)
    assert changed_values(_config(folder, "algorithm.adv_estimator=grpo")) is None


def test_nothing_is_said_where_a_checkpoint_is_only_evaluated(folder: Path, tmp_path: Path) -> None:
    evaluated = ("trainer.val_only=true", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.val_kwargs.n=4")
    named = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/global_step_4")
    assert changed_values(_config(folder, *evaluated)) is None
    assert changed_values(_config(tmp_path / "eval", *named, *evaluated)) is None


def test_a_long_value_is_cut(folder: Path) -> None:
    files = ",".join(f"part_{number:05}.parquet" for number in range(2000))
    line = changed_values(_config(folder, *SAME, f"data.train_files=[{files}]"))
    assert line is not None and "data.train_files=['part_00000.parquet'" in line and len(line) < 1000
