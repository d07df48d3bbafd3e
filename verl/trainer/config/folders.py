"""The folders of a run, tried out before anything starts."""

from __future__ import annotations

import tempfile
from pathlib import Path

from verl.trainer.config.errors import ConfigError
from verl.trainer.config.schema import PPOTrainerConfig

_PROBE_BYTES = 65536  # a disk without room for this has none for the logs either


def make_folders(config: PPOTrainerConfig) -> None:
    """Make the folders that a run writes to, and write a file that vanishes at once to each.

    Raises:
        ConfigError: a folder cannot be made or written to; better now than when the first file is due.
    """
    trainer = config.trainer
    places = {
        "trainer.default_local_dir": trainer.default_local_dir if trainer.save_freq > 0 else None,
        "trainer.run_dir": trainer.run_dir,
        "trainer.rollout_data_dir": trainer.rollout_data_dir,
        "trainer.validation_data_dir": trainer.validation_data_dir,
    }
    for key, place in places.items():
        if place is None:
            continue
        folder = Path(place).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
                probe.write(bytes(_PROBE_BYTES))
        except OSError as error:
            raise ConfigError(
                f"{key}={place}: the folder cannot be made or written to ({error.strerror}); make room or use another "
                "folder"
            ) from error
