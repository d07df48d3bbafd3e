"""What an entry point does with a composed configuration: type it, check it, show it, keep it."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from verl.trainer.config.convert import to_dataclass
from verl.trainer.config.earlier_run import RESOLVED_NAME
from verl.trainer.config.errors import ConfigError
from verl.trainer.config.machine import resolve_device
from verl.trainer.config.notices import notices
from verl.trainer.config.schema import PPOTrainerConfig
from verl.trainer.config.validate import validate
from verl.trainer.config.yaml_text import yaml_text
from verl.utils.checkpoint.step_folder import is_step_folder
from verl.utils.fs import write_atomically
from verl.utils.logger.metrics_file import FILE_NAME

logger = logging.getLogger(__name__)


def prepare_config(config: DictConfig) -> PPOTrainerConfig:
    """The typed and checked configuration, shown in the log and kept in the run folder.

    In the folder of an earlier run the file stays that run's until this one has come as far as to take its place
    (``verl.trainer.ppo.run_record``): a start that fails, or finds nothing left to train, replaces nothing. A run
    started with ``--config-path RUN_FOLDER --config-name resolved_config`` is the same run.

    Raises:
        ConfigError: the configuration cannot run; nothing has been written then.
    """
    typed = resolve_device(to_dataclass(config))
    validate(typed)
    text = to_yaml(typed)
    logger.info("resolved configuration:\n%s", text)
    for line in notices(typed):
        logger.warning(line)
    if not holds_run(typed.trainer.run_dir):
        logger.info("kept as %s", write_resolved(text, typed.trainer.run_dir))
    return typed


def holds_run(run_dir: str | os.PathLike[str]) -> bool:
    """Whether the folder has the metrics or a checkpoint of a run."""
    folder = Path(run_dir).expanduser()
    return (folder / FILE_NAME).exists() or any(map(is_step_folder, folder.glob("global_step_*")))


def pin_split(config: PPOTrainerConfig, digest: str | None) -> PPOTrainerConfig:
    """The configuration with the digest of the tasks' split in it; None changes nothing.

    Raises:
        ConfigError: ``env.split_digest`` names another split: scores would not compare.
    """
    if digest is None:
        return config
    if config.env.split_digest not in (None, digest):
        raise ConfigError(
            f"env.split_digest={config.env.split_digest}, but the tasks here are split as {digest}: data or "
            "env.webshop keys differ from the run this configuration is of; restore them, or set env.split_digest=null"
        )
    return replace(config, env=replace(config.env, split_digest=digest))


def to_yaml(config: PPOTrainerConfig) -> str:
    """The configuration as YAML with all values resolved; Hydra reads the same values from it."""
    return yaml_text(config.to_dict())


def write_resolved(text: str, run_dir: str | os.PathLike[str]) -> Path:
    """Write ``resolved_config.yaml`` to the run folder, whole or not at all; returns its path."""
    path = Path(run_dir).expanduser() / f"{RESOLVED_NAME}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
    return path
