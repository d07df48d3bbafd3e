"""The name of a checkpoint's folder, which holds its step, and of the file that names the newest one."""

from __future__ import annotations

import re
from pathlib import Path

TRACKER_FILE = "latest_checkpointed_iteration.txt"
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
