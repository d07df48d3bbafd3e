"""Which checkpoint a run starts from, and whether anything is left to train: known before anything is imported."""

from __future__ import annotations

from pathlib import Path

from verl.trainer.config import PPOTrainerConfig
from verl.utils.checkpoint.step_folder import TRACKER_FILE, step_of


def checkpoint_root(config: PPOTrainerConfig) -> Path:
    """``trainer.default_local_dir``, absolute."""
    return Path(config.trainer.default_local_dir).expanduser().absolute()


def find_checkpoint(resume_mode: str, resume_from_path: str | None, root: Path) -> Path | None:
    """The checkpoint folder to resume from, or None for a fresh start.

    Args:
        resume_mode: ``disable``, ``auto`` (what the tracker file names) or ``resume_path``.
        resume_from_path: the folder, for ``resume_path``; relative to the working directory if not absolute.
        root: ``trainer.default_local_dir``.

    Raises:
        ValueError: a folder that does not exist or is no checkpoint.
    """
    if resume_mode == "disable":
        return None
    if resume_mode == "resume_path":
        if not resume_from_path:
            raise ValueError("trainer.resume_mode=resume_path needs trainer.resume_from_path=…/global_step_<number>")
        folder = Path(resume_from_path).expanduser().absolute()
        step_of(folder)
        if not folder.is_dir():
            raise ValueError(f"trainer.resume_from_path={folder} does not exist")
        return folder
    tracker = root / TRACKER_FILE
    if not tracker.is_file():
        return None
    text = tracker.read_text().strip()
    folder = root / f"global_step_{text}"
    if not text.isdigit() or not folder.is_dir():
        raise ValueError(
            f"{tracker} names step {text!r}, but {folder} is no checkpoint; correct the file, or start afresh with "
            "trainer.resume_mode=disable"
        )
    return folder


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
