"""From rows to token-level scores: the reward manager of the run, or the user's own function."""
from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from agent_system.reward_manager import EpisodeRewardManager
from verl.protocol import DataProto
from verl.trainer.config.schema import PPOTrainerConfig
from verl.utils.external_lib import what_failed

RewardFunction = Callable[..., Any]


def get_custom_reward_fn(config: PPOTrainerConfig) -> RewardFunction | None:
    """The function named by ``custom_reward_function.{path,name}``; None when no path is set.

    Raises:
        ValueError: the file does not exist, cannot be imported, or has no function of that name.
    """
    path, name = config.custom_reward_function.path, config.custom_reward_function.name
    if not path:
        return None
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"custom_reward_function.path={path} is not a file")
    spec = importlib.util.spec_from_file_location("custom_reward_function", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"custom_reward_function.path={path} cannot be imported: {what_failed(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"custom_reward_function.name={name}: {path} defines no such function")
    return function


def load_reward_manager(
    config: PPOTrainerConfig, tokenizer: Any, num_examine: int, **reward_kwargs: Any
) -> EpisodeRewardManager:
    """The reward manager of ``reward_model.reward_manager``; only ``episode`` exists for multi-turn runs."""
    name = config.reward_model.reward_manager
    if name != "episode":
        raise ValueError(f"reward_model.reward_manager={name} is not available; the one for agents is: episode")
    custom = get_custom_reward_fn(config)
    if custom is not None:
        reward_kwargs["compute_score"] = custom
    return EpisodeRewardManager(
        tokenizer=tokenizer, num_examine=num_examine, normalize_by_length=False, **reward_kwargs
    )


def compute_reward(data: DataProto, reward_fn: RewardFunction) -> tuple[torch.Tensor, dict[str, Any]]:
    """Token-level scores ``(rows, response_length)`` float32 and the extra columns the manager reports."""
    result = reward_fn(data, return_dict=True)
    return result["reward_tensor"], result.get("reward_extra_info", {})
