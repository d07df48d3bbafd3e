"""Saving a training run and going on with it: the driver's state beside the files of the ranks."""
from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from agent_system.multi_turn_rollout import TrajectoryCollector
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.ppo.dataloaders import position_shape, restore_position
from verl.trainer.ppo.kl import KLController
from verl.trainer.ppo.trainer_checkpoint import CheckpointFolder, TrainerState, load_state
from verl.utils.checkpoint.step_folder import find_checkpoint, step_of
from verl.utils.tracking import Tracking

logger = logging.getLogger(__name__)


class CheckpointedTrainer:
    """A trainer that a checkpoint can be made of, and that can start from one.

    Attributes:
        config, checkpoint_root: where checkpoints go, how many stay and which one is resumed.
        global_steps, total_training_steps: how far the run is, and how far it is to go.
        actor_rollout_wg, critic_wg: ranks that write and read files of their own.
        train_dataloader, envs, traj_collector, kl_ctrl_in_reward, tracker: what else goes on where it stood:
            environments that have a state, the controller where the reward has a KL penalty, the tracker of ``fit``.
    """

    config: PPOTrainerConfig
    checkpoint_root: Path
    global_steps: int
    total_training_steps: int
    actor_rollout_wg: RayWorkerGroup
    critic_wg: RayWorkerGroup | None
    train_dataloader: Any
    envs: Any
    traj_collector: TrajectoryCollector
    kl_ctrl_in_reward: KLController | None
    tracker: Tracking
    _newest_checkpoint: Path | None = None  # that this run wrote or started from

    def _split_digest(self) -> str | None:
        """Names the split of the tasks into training and validation; None for environments that have none."""
        return getattr(self.envs, "split_digest", None) or None

    def _trainer_state(self, step: int) -> TrainerState:
        tracker = getattr(self, "tracker", None)
        return TrainerState(
            global_step=step,
            dataloader=self.train_dataloader.state_dict(),
            environments={"train": self.envs.state_dict()} if hasattr(self.envs, "state_dict") else {},
            kl_controller=self.kl_ctrl_in_reward.state_dict() if self.kl_ctrl_in_reward is not None else None,
            collector=self.traj_collector.state_dict(),
            tracker=tracker.state_dict() if tracker is not None else {},
            split_digest=self._split_digest(),
            data_shape=position_shape(self.train_dataloader),
        )

    def _save_checkpoint(self, state: TrainerState) -> None:
        trainer = self.config.trainer
        folder = CheckpointFolder(self.checkpoint_root, state.global_step)
        try:
            self.actor_rollout_wg.save_checkpoint(folder.path("actor"), None, state.global_step, None)
            if self.critic_wg is not None:
                self.critic_wg.save_checkpoint(folder.path("critic"), None, state.global_step, None)
            folder.save_state(state)
            folder.save_config(self.config)
        except BaseException:
            folder.discard()
            raise
        folder.commit(keep=trainer.max_actor_ckpt_to_keep)
        self._newest_checkpoint = folder.final

    def _kept(self) -> str:
        """What the checkpoints have of this run at its end, as a part of its last line."""
        newest, reason = self._newest_checkpoint, f"(trainer.save_freq={self.config.trainer.save_freq})"
        if newest is None:
            return f"no checkpoint was kept {reason}"
        if step_of(newest) == self.global_steps:
            return f"the newest checkpoint is {newest}"
        return f"no checkpoint was kept after the one it went on from, {newest} {reason}"

    def _load_checkpoint(self) -> None:
        trainer = self.config.trainer
        self._tracker_state: dict[str, Any] = {}
        folder = find_checkpoint(trainer.resume_mode, trainer.resume_from_path, self.checkpoint_root)
        if folder is None:
            return
        state = load_state(folder)
        if state.split_digest not in (None, self._split_digest()):
            logger.warning(
                "the checkpoint was made on the task split %s, this run has %s: scores before and after do not compare",
                state.split_digest,
                self._split_digest(),
            )
        loaded = self._load_ranks(folder)
        if state.dataloader is not None:
            restore_position(self.train_dataloader, state.dataloader, state.data_shape)
        if "train" in state.environments:
            self.envs.load_state_dict(state.environments["train"])
        if state.collector:
            self.traj_collector.load_state_dict(state.collector)
        if self.kl_ctrl_in_reward is not None and state.kl_controller is not None:
            self.kl_ctrl_in_reward.load_state_dict(state.kl_controller)
        if trainer.del_local_ckpt_after_load:  # now that all of it could be read
            for part in loaded:
                shutil.rmtree(part)
        else:
            self._newest_checkpoint = folder
        self._tracker_state = state.tracker
        self.global_steps = state.global_step
        logger.info("resumed from %s: step %d of %d", folder, self.global_steps, self.total_training_steps)

    def _load_ranks(self, folder: Path) -> list[Path]:
        """Have the ranks read what their roles wrote; returns the folders of these roles.

        Raises:
            ValueError: the run has a critic and the checkpoint has none, or a file cannot be read.
        """
        actor, critic = folder / "actor", folder / "critic"
        if self.critic_wg is not None and actor.is_dir() and not critic.is_dir():
            raise ValueError(
                f"the checkpoint {folder} has no critic, and this run trains one: give critic.enable and "
                "algorithm.adv_estimator the values of the run that wrote it, or start afresh with "
                "trainer.resume_mode=disable"
            )
        if self.critic_wg is None and critic.is_dir():
            logger.warning("this run trains no critic (critic.enable): the one of %s is left out", folder)
        self.actor_rollout_wg.load_checkpoint(str(actor))
        if self.critic_wg is None:
            return [actor]
        self.critic_wg.load_checkpoint(str(critic))
        return [actor, critic]
