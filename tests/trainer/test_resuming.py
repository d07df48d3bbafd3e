"""Going on from a checkpoint: which roles it has to have, and when it may be deleted."""
from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl.trainer.config import compose_config, to_dataclass
from verl.trainer.ppo.checkpointed_trainer import CheckpointedTrainer
from verl.trainer.ppo.resume_point import nothing_left
from verl.trainer.ppo.trainer_checkpoint import CheckpointFolder, TrainerState


class Ranks:
    """A worker group that notes what it is to load, and may find it damaged."""

    def __init__(self, damaged: bool = False) -> None:
        self.loaded: list[str] = []
        self.damaged = damaged

    def load_checkpoint(self, local_path: str) -> None:
        if self.damaged:
            raise ValueError("the checkpoint cannot be read")
        self.loaded.append(Path(local_path).name)


    def save_checkpoint(self, local_path: str, *_: object) -> None:
        Path(local_path).mkdir()


def resume(
    root: Path, saved: tuple[str, ...], critic: Ranks | None, delete: bool = False, save_freq: int = -1
) -> CheckpointedTrainer:
    """A trainer that resumed from a checkpoint of step 3 with these roles."""
    folder = CheckpointFolder(root, 3)
    for role in saved:
        Path(folder.path(role)).mkdir()
    folder.save_state(TrainerState(global_step=3))
    folder.commit(keep=None)
    trainer = CheckpointedTrainer()
    settings = [f"trainer.del_local_ckpt_after_load={delete}", f"trainer.save_freq={save_freq}"]
    trainer.config = to_dataclass(compose_config(settings))
    trainer.checkpoint_root, trainer.total_training_steps = root, 8
    trainer.actor_rollout_wg, trainer.critic_wg = Ranks(), critic
    trainer.train_dataloader, trainer.envs, trainer.kl_ctrl_in_reward = None, SimpleNamespace(), None
    trainer._load_checkpoint()
    return trainer


def roles_left(root: Path) -> list[str]:
    return sorted(part.name for part in (root / "global_step_3").iterdir() if part.is_dir())


def test_both_roles_go_on(tmp_path: Path) -> None:
    trainer = resume(tmp_path, ("actor", "critic"), Ranks())
    assert (trainer.actor_rollout_wg.loaded, trainer.critic_wg.loaded) == (["actor"], ["critic"])
    assert trainer.global_steps == 3 and roles_left(tmp_path) == ["actor", "critic"]


def test_the_last_line_names_what_was_kept(tmp_path: Path) -> None:
    trainer = resume(tmp_path / "resumed", ("actor",), None)
    trainer.global_steps = 8
    assert trainer._kept() == (
        f"no checkpoint was kept after the one it went on from, {tmp_path}/resumed/global_step_3 (trainer.save_freq=-1)"
    )
    trainer._save_checkpoint(TrainerState(global_step=8))
    assert trainer._kept() == f"the newest checkpoint is {tmp_path}/resumed/global_step_8"
    consumed = resume(tmp_path / "consumed", ("actor",), None, delete=True)
    consumed.global_steps = 8
    assert consumed._kept() == "no checkpoint was kept (trainer.save_freq=-1)"


@pytest.mark.parametrize(
    ("mode", "total", "val_only", "ends"),
    [
        ("auto", 3, False, True),
        ("auto", 2, False, True),  # trainer.total_epochs was lowered
        ("auto", 4, False, False),
        ("auto", None, False, False),
        ("auto", 3, True, False),
        ("disable", 3, False, False),
    ],
)
def test_a_run_that_is_done_says_so(tmp_path: Path, mode: str, total: int | None, val_only: bool, ends: bool) -> None:
    CheckpointFolder(tmp_path, 3).commit(keep=None)
    settings = dict(default_local_dir=str(tmp_path), resume_mode=mode, resume_from_path=None, val_only=val_only)
    line = nothing_left(SimpleNamespace(trainer=SimpleNamespace(**settings)), total)
    assert line == (
        f"nothing left to train: step 3 of {total} is done; raise trainer.total_epochs or total_training_steps, or use "
        "trainer.val_only=true to validate"
        if ends
        else None
    )


@pytest.mark.parametrize("delete", [False, True])
def test_a_critic_turned_on_later_has_nothing_to_go_on_from(tmp_path: Path, delete: bool) -> None:
    with pytest.raises(ValueError, match="global_step_3 has no critic.*critic.enable.*trainer.resume_mode=disable"):
        resume(tmp_path, ("actor",), Ranks(), delete)
    assert roles_left(tmp_path) == ["actor"]


def test_a_critic_turned_off_later_is_left_where_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        trainer = resume(tmp_path, ("actor", "critic"), None, delete=True)
    assert trainer.actor_rollout_wg.loaded == ["actor"] and roles_left(tmp_path) == ["critic"]
    assert "trains no critic (critic.enable)" in caplog.text


def test_a_checkpoint_is_deleted_only_after_all_of_it_was_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        resume(tmp_path / "damaged", ("actor", "critic"), Ranks(damaged=True), delete=True)
    assert roles_left(tmp_path / "damaged") == ["actor", "critic"]
    resume(tmp_path / "whole", ("actor", "critic"), Ranks(), delete=True)
    assert roles_left(tmp_path / "whole") == []
