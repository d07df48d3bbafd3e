"""What an entry point does with a composed configuration: type it, check it, show it, keep it."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import yaml
from omegaconf import DictConfig

from verl.trainer.config.convert import to_dataclass
from verl.trainer.config.earlier_run import RESOLVED_NAME, changed_values
from verl.trainer.config.errors import ConfigError
from verl.trainer.config.machine import resolve_device
from verl.trainer.config.notices import notices
from verl.trainer.config.schema import PPOTrainerConfig
from verl.trainer.config.validate import validate
from verl.utils.fs import write_atomically

logger = logging.getLogger(__name__)


def prepare_config(config: DictConfig) -> PPOTrainerConfig:
    """The typed and checked configuration, shown in the log and kept in the run folder.

    A run started with ``--config-path RUN_FOLDER --config-name resolved_config`` is the same run.

    Raises:
        ConfigError: the configuration cannot run; nothing has been written then.
    """
    typed = resolve_device(to_dataclass(config))
    validate(typed)
    text = to_yaml(typed)
    logger.info("resolved configuration:\n%s", text)
    for line in notices(typed):
        logger.warning(line)
    if changed := changed_values(typed):
        logger.warning(changed)
    logger.info("kept as %s", write_resolved(text, typed.trainer.run_dir))
    return typed


def pin_split(config: PPOTrainerConfig, digest: str | None) -> PPOTrainerConfig:
    """The configuration with the digest of the tasks' split in it, kept in the run folder; None changes nothing.

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
    pinned = replace(config, env=replace(config.env, split_digest=digest))
    write_resolved(to_yaml(pinned), pinned.trainer.run_dir)
    return pinned


def to_yaml(config: PPOTrainerConfig) -> str:
    """The configuration as YAML with all values resolved."""
    return yaml.safe_dump(config.to_dict(), sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)


def write_resolved(text: str, run_dir: str | os.PathLike[str]) -> Path:
    """Write ``resolved_config.yaml`` to the run folder, whole or not at all; returns its path."""
    path = Path(run_dir).expanduser() / f"{RESOLVED_NAME}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
    return path
