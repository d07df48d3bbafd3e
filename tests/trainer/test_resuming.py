"""Going on from a checkpoint: which roles it has to have, and when it may be deleted."""
from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl.trainer.ppo.checkpointed_trainer import CheckpointedTrainer
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


def resume(root: Path, saved: tuple[str, ...], critic: Ranks | None, delete: bool = False) -> CheckpointedTrainer:
    """A trainer that resumed from a checkpoint of step 3 with these roles."""
    folder = CheckpointFolder(root, 3)
    for role in saved:
        Path(folder.path(role)).mkdir()
    folder.save_state(TrainerState(global_step=3))
    folder.commit(keep=None)
    trainer = CheckpointedTrainer()
    settings = dict(resume_mode="auto", resume_from_path=None, del_local_ckpt_after_load=delete)
    trainer.config = SimpleNamespace(trainer=SimpleNamespace(**settings))
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
