"""Whether a run has anything left to train from where it starts: known before anything is imported."""

from __future__ import annotations

from pathlib import Path

from verl.trainer.config import PPOTrainerConfig
from verl.utils.checkpoint.step_folder import find_checkpoint, step_of


def checkpoint_root(config: PPOTrainerConfig) -> Path:
    """``trainer.default_local_dir``, absolute."""
    return Path(config.trainer.default_local_dir).expanduser().absolute()


def nothing_left(config: PPOTrainerConfig, total_steps: int | None) -> str | None:
    """One line if the checkpoint that the run would start from has its last step, None if there is something to do.

    Args:
        total_steps: of the whole run; None if that is not known yet.

    Raises:
        ValueError: what ``find_checkpoint`` finds wrong.
    """
    trainer = config.trainer
    folder = find_checkpoint(trainer.resume_mode, trainer.resume_from_path, checkpoint_root(config))
    if folder is None or total_steps is None or trainer.val_only or step_of(folder) < total_steps:
        return None
    return (
        f"nothing left to train: step {step_of(folder)} of {total_steps} is done; raise trainer.total_epochs or "
        "total_training_steps, or use trainer.val_only=true to validate"
    )
