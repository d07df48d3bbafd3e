"""Rules that a configuration has to meet before anything starts."""

from __future__ import annotations

from verl.trainer.config.schema import PPOTrainerConfig


def validate(config: PPOTrainerConfig) -> None:
    """Raises ConfigError where the run cannot work."""
