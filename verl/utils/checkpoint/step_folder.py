"""The name of a checkpoint's folder, which holds its step, the file that names the newest one, and how it is found."""

from __future__ import annotations

import os
import re
from pathlib import Path

TRACKER_FILE = "latest_checkpointed_iteration.txt"
_MOST_NAMED = 8
_STEP_FOLDER = re.compile(r"global_step_(\d+)$")


def is_step_folder(folder: Path) -> bool:
    """Whether the folder is named as that of a complete checkpoint."""
    return _STEP_FOLDER.search(folder.name) is not None


def step_of(folder: Path) -> int:
    """The step in a checkpoint folder's name; ``ValueError`` if the name holds none."""
    match = _STEP_FOLDER.search(folder.name)
    if match is None:
        raise ValueError(f"trainer.resume_from_path={folder} must end in global_step_<number>")
    return int(match.group(1))


def set_aside(folder: Path) -> Path:
    """The name of a checkpoint's folder while it is removed or replaced: half of it must not pass for a whole one."""
    return folder.with_name(f"{folder.name}.old.tmp")


def resume_path_problem(path: str) -> str | None:
    """Why ``trainer.resume_from_path`` names no checkpoint, with the steps that there are; None if it does."""
    folder = Path(path).expanduser().absolute()
    if not is_step_folder(folder):
        run = folder if saved_steps(folder) else folder.parent
        return f"trainer.resume_from_path={path} must end in global_step_<number>; {steps_there(run)}"
    if not folder.is_dir():
        return f"trainer.resume_from_path={path}: there is no such folder; {steps_there(folder.parent)}"
    return None


def saved_steps(run: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, in order."""
    return sorted(step_of(one) for one in run.glob("global_step_*") if is_step_folder(one) and one.is_dir())


def steps_there(run: Path) -> str:
    """What there is to resume from in the folder of a run, in words: the newest steps."""
    steps = saved_steps(run)
    if not steps:
        return f"{run} has no checkpoints"
    earlier = "" if len(steps) <= _MOST_NAMED else f" and {len(steps) - _MOST_NAMED} earlier"
    return f"{run} has {', '.join(f'global_step_{step}' for step in steps[-_MOST_NAMED:])}{earlier}"


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
        if problem := resume_path_problem(resume_from_path):
            raise ValueError(problem)
        return Path(resume_from_path).expanduser().absolute()
    tracker = root / TRACKER_FILE
    if not tracker.is_file():
        return None
    text = tracker.read_text().strip()
    folder = root / f"global_step_{text}"
    if not folder.is_dir() and set_aside(folder).is_dir():  # a kill came between two renames: the old one is whole
        os.replace(set_aside(folder), folder)
    if not text.isdigit() or not folder.is_dir():
        raise ValueError(
            f"{tracker} names step {text!r}, but {folder} is no checkpoint; correct the file, or start afresh with "
            "trainer.resume_mode=disable"
        )
    return folder
