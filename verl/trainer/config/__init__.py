"""Configuration of a training run: what the user types, checked and typed before anything heavy starts.

Neither torch nor Ray is imported here, so a mistake is answered in a second.
"""

from verl.trainer.config.command_line import hydra_main
from verl.trainer.config.compose import CONFIG_DIR, compose_config, default_config
from verl.trainer.config.convert import node_from_dict, to_dataclass
from verl.trainer.config.errors import ConfigError
from verl.trainer.config.prepare import pin_split, prepare_config
from verl.trainer.config.schema import PPOTrainerConfig
from verl.trainer.config.validate import validate

__all__ = [
    "CONFIG_DIR",
    "ConfigError",
    "PPOTrainerConfig",
    "compose_config",
    "default_config",
    "hydra_main",
    "node_from_dict",
    "pin_split",
    "prepare_config",
    "to_dataclass",
    "validate",
]
