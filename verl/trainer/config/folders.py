"""The folders of a run, tried out before anything starts."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from pathlib import Path

from verl.trainer.config.errors import ConfigError
from verl.trainer.config.schema import PPOTrainerConfig

_PROBE_BYTES = 65536  # a disk without room for this has none for the logs either
_PATIENCE_SECONDS = 5.0  # for a run that is just ending
_held: dict[str, int] = {}  # folders of runs of this process, each with the descriptor that locks it


def make_folders(config: PPOTrainerConfig) -> None:
    """Make the folders that a run writes to, and write a file that vanishes at once to each.

    Raises:
        ConfigError: a folder cannot be made or written to, or another run writes to it; better now than when the
            first file is due.
    """
    trainer = config.trainer
    places = {
        "trainer.default_local_dir": trainer.default_local_dir if trainer.save_freq > 0 else None,
        "trainer.run_dir": trainer.run_dir,
        "trainer.rollout_data_dir": trainer.rollout_data_dir,
        "trainer.validation_data_dir": trainer.validation_data_dir,
    }
    for key, place in places.items():
        if place is not None:
            make_folder(key, place)
    hold_run_folder("trainer.run_dir", trainer.run_dir)
    if not trainer.val_only and Path(trainer.default_local_dir).expanduser().is_dir():
        hold_run_folder("trainer.default_local_dir", trainer.default_local_dir)


def make_folder(key: str, place: str) -> None:
    """Make a folder that the setting ``key`` names, and write a file that vanishes at once to it.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    folder = Path(place).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()  # a buffer goes on after a write that fitted in part, and so meets the end of the disk
    except OSError as error:
        raise ConfigError(
            f"{key}={place}: the folder cannot be made or written to ({error.strerror}); make room or use another "
            "folder"
        ) from error


def hold_run_folder(key: str, run_dir: str | os.PathLike[str], patience: float | None = None) -> None:
    """Lock a folder of a run until this process ends, so that two runs never mix their metrics and checkpoints.

    The lock is on the folder itself and leaves no file. A file system that has no locks is taken as it is.

    Args:
        key: the setting that names the folder.
        run_dir: the folder; it exists.
        patience: seconds to wait for a run that is just ending; None: a few.

    Raises:
        ConfigError: another process holds it.
    """
    folder = str(Path(run_dir).expanduser().resolve())
    if folder in _held:
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    give_up = time.monotonic() + (_PATIENCE_SECONDS if patience is None else patience)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > give_up:
                os.close(descriptor)
                raise ConfigError(
                    f"{key}={run_dir}: another run is writing to this folder; wait for it, stop it, or use "
                    "another trainer.experiment_name"
                ) from None
            time.sleep(0.2)
            continue
        except OSError:
            os.close(descriptor)
            return
        _held[folder] = descriptor
        return
