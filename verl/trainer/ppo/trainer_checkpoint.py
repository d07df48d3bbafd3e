"""Where the checkpoints of a run lie and what the driver itself has to remember.

Layout (``root`` is ``trainer.default_local_dir``)::

    root/latest_checkpointed_iteration.txt      the newest complete step
    root/global_step_40/actor/…                 written by the actor's ranks
    root/global_step_40/critic/…                when there is a critic
    root/global_step_40/data.pt                 data loader
    root/global_step_40/trainer_state.pt        environments, KL, carried groups, tracker, digest of the goal split
    root/global_step_40/resolved_config.yaml    what it was trained with

A step's folder is written as ``global_step_40.tmp`` and renamed when everything lies in it; only then does the tracker
file name it. One that goes is renamed to ``global_step_40.old.tmp`` first. A killed run therefore leaves at worst
``.tmp`` folders, which the next save of any step removes.
"""
from __future__ import annotations

import logging
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from verl.trainer.config import PPOTrainerConfig
from verl.trainer.config.prepare import to_yaml, write_resolved
from verl.utils.checkpoint.errors import explained_read, explained_write
from verl.utils.checkpoint.step_folder import TRACKER_FILE, is_step_folder, set_aside, step_of
from verl.utils.fs import write_atomically

logger = logging.getLogger(__name__)


@dataclass
class TrainerState:
    """What the driver saves beside the ranks' own files.

    ``split_digest`` names the split of the tasks into training and validation, where the environment has one;
    ``collector`` holds the groups that the next rollout starts with (``algorithm.filter_groups.surplus=carry``);
    ``data_shape`` says what the position of the data loader counts.
    """

    global_step: int
    dataloader: dict[str, Any] | None = None
    environments: dict[str, Any] = field(default_factory=dict)
    kl_controller: dict[str, Any] | None = None
    tracker: dict[str, Any] = field(default_factory=dict)
    split_digest: str | None = None
    collector: dict[str, Any] = field(default_factory=dict)
    data_shape: dict[str, Any] = field(default_factory=dict)


class CheckpointFolder:
    """One step's folder while it is being written; ``commit`` makes it the newest checkpoint."""

    def __init__(self, root: Path, global_step: int) -> None:
        self.root = root
        self.global_step = global_step
        self.final = root / f"global_step_{global_step}"
        self.partial = root / f"global_step_{global_step}.tmp"
        for left in root.glob("global_step_*.tmp"):  # by a run that was killed: one run writes here at a time
            shutil.rmtree(left, ignore_errors=True)
        try:
            self.partial.mkdir(parents=True)
        except OSError as error:
            raise ValueError(f"cannot write checkpoints to trainer.default_local_dir={root}: {error}") from error

    def path(self, role: str) -> str:
        return str(self.partial / role)

    def save_state(self, state: TrainerState) -> None:
        """Write what the driver remembers; raises ``CheckpointWriteError`` where the disk does not take it."""
        with explained_write(self.partial):
            torch.save(state.dataloader, self.partial / "data.pt")
            rest = {key: value for key, value in vars(state).items() if key != "dataloader"}
            torch.save(rest, self.partial / "trainer_state.pt")

    def save_config(self, config: PPOTrainerConfig) -> None:
        """Write the configuration that this step was trained with; raises as ``save_state``."""
        with explained_write(self.partial):
            write_resolved(to_yaml(config), self.partial)

    def discard(self) -> None:
        """Remove what was written so far; the checkpoints before it stay."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def commit(self, keep: int | None) -> None:
        """Rename the folder, point the tracker file at it, drop the oldest beyond ``keep`` (None: keep all).

        The oldest are those written first, whatever their step: beside checkpoints of a longer run that was started
        over, the new ones have the lower numbers.
        """
        if self.final.exists():
            os.replace(self.final, set_aside(self.final))
        os.replace(self.partial, self.final)
        shutil.rmtree(set_aside(self.final), ignore_errors=True)
        now = time.time_ns()
        os.utime(self.final, ns=(now, now))
        write_atomically(self.root / TRACKER_FILE, str(self.global_step))
        if keep is not None:
            others = [folder for folder in complete_checkpoints(self.root) if folder != self.final]
            for folder in others[: max(0, len(others) + 1 - max(keep, 1))]:
                os.replace(folder, set_aside(folder))
                shutil.rmtree(set_aside(folder))
        logger.info("checkpoint of step %d written to %s", self.global_step, self.final)


def complete_checkpoints(root: Path) -> list[Path]:
    """The checkpoint folders under ``root`` that were written whole, in the order they were written."""
    folders = (f for f in root.glob("global_step_*") if is_step_folder(f))
    return sorted(folders, key=lambda folder: (folder.stat().st_mtime_ns, step_of(folder)))


def load_state(folder: Path) -> TrainerState:
    """What ``CheckpointFolder.save_state`` wrote; a missing ``data.pt`` restarts the loader, with a warning."""
    state_file, data_file = folder / "trainer_state.pt", folder / "data.pt"
    state = TrainerState(global_step=step_of(folder))
    if state_file.is_file():
        with explained_read(folder):
            state = TrainerState(**torch.load(state_file, weights_only=False))
    else:
        logger.warning("%s is missing: tasks start again from the first", state_file)
    if data_file.is_file():
        with explained_read(folder):
            state.dataloader = torch.load(data_file, weights_only=False)
    else:
        logger.warning("%s is missing: the data loader starts again from the first batch", data_file)
    return state
