"""Small helpers around transformers configs and padded batches."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

logger = logging.getLogger(__name__)


def update_model_config(module_config: Any, override_config_kwargs: Mapping[str, Any]) -> None:
    """Set values on a (nested) config object, in place; a mapping as value descends into the attribute of that name."""
    for key, value in override_config_kwargs.items():
        if isinstance(value, Mapping):
            inner = getattr(module_config, key)
            if isinstance(inner, dict):
                inner.update(value)
            else:
                update_model_config(inner, value)
        else:
            setattr(module_config, key, value)


def get_huggingface_actor_config(
    model_name: str, override_config_kwargs: Mapping[str, Any] | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Load a transformers config and apply overrides."""
    config = AutoConfig.from_pretrained(model_name, trust_remote_code=trust_remote_code)
    update_model_config(config, override_config_kwargs or {})
    return config


def get_generation_config(model: str, trust_remote_code: bool = False) -> GenerationConfig | None:
    """The generation config of a model folder, derived from ``config.json`` if it has none; None if neither exists."""
    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:
        pass
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        return GenerationConfig.from_model_config(config)
    except OSError:
        return None


def mlp_width(config: Any) -> int:
    """Features of a token inside the MLP of a decoder layer, with experts those of all it goes to and of shared ones.

    A family that does not name the size of its MLP has four times the hidden size.
    """
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    experts = getattr(config, "num_experts_per_tok", None)
    if not experts:
        return width
    expert = getattr(config, "moe_intermediate_size", None) or width
    shared = (getattr(config, "n_shared_experts", None) or 0) * expert
    return experts * expert + (getattr(config, "shared_expert_intermediate_size", None) or shared)


def get_model_size(model: nn.Module, scale: str = "auto") -> tuple[float, str]:
    """Parameter count scaled to ``B``, ``M``, ``K`` or ``""``; returns ``(count, unit)``."""
    count = float(sum(p.numel() for p in model.parameters()))
    if scale == "auto":
        scale = "B" if count > 1e9 else "M" if count > 1e6 else "K" if count > 1e3 else ""
    units = {"B": 1e9, "M": 1e6, "K": 1e3, "": 1.0}
    if scale not in units:
        raise ValueError(f"scale is one of 'auto', 'B', 'M', 'K', '', got {scale!r}")
    return count / units[scale], scale


def print_model_size(model: nn.Module, name: str | None = None) -> None:
    """Log the parameter count."""
    count, unit = get_model_size(model)
    logger.info("%s has %.2f%s parameters", name or type(model).__name__, count, unit)


def compute_position_id_with_mask(mask: torch.Tensor) -> torch.Tensor:
    """Position of each token among the unmasked ones: ``(…, L) -> (…, L)``, zero on left padding."""
    return torch.clip(torch.cumsum(mask, dim=-1) - 1, min=0)


def create_random_mask(
    input_ids: torch.Tensor,
    max_ratio_of_valid_token: float,
    max_ratio_of_left_padding: float,
    min_ratio_of_valid_token: float = 0.0,
) -> torch.Tensor:
    """A random contiguous attention mask per row, for tests: ``(B, L)`` ones and zeros, dtype of ``input_ids``."""
    if not 0 < max_ratio_of_valid_token <= 1.0:
        raise ValueError("max_ratio_of_valid_token must lie in (0, 1]")
    if not 0 <= max_ratio_of_left_padding < 1.0:
        raise ValueError("max_ratio_of_left_padding must lie in [0, 1)")
    if not min_ratio_of_valid_token <= max_ratio_of_valid_token:
        raise ValueError("min_ratio_of_valid_token must not pass max_ratio_of_valid_token")
    batch, length = input_ids.shape
    most = max(int(length * max_ratio_of_valid_token), 1)
    least = max(int(length * min_ratio_of_valid_token), 1)
    left_most = int(length * max_ratio_of_left_padding)
    assert most + left_most <= length, "the longest row and the longest padding do not fit together"
    mask = torch.ones_like(input_ids)
    for row in range(batch):
        valid = np.random.randint(least, most + 1)
        left = np.random.randint(0, left_most + 1)
        mask[row, :left] = 0
        mask[row, left + valid :] = 0
    return mask


def squeeze(x: torch.Tensor) -> torch.Tensor:
    """Drop a trailing dimension of one."""
    return torch.squeeze(x, dim=-1)


def convert_weight_keys(state_dict: Mapping[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """Undo a model's checkpoint key mapping: names as the model has them become names as its checkpoint has them."""
    mapping = getattr(model, "_checkpoint_conversion_mapping", None)
    if not mapping:
        return dict(state_dict)
    reverse = {new: re.sub(r"\(.*\)", "", old.lstrip("^")) for old, new in mapping.items()}
    converted = {}
    for key, value in state_dict.items():
        for pattern, replacement in reverse.items():
            key, hits = re.subn(pattern, replacement, key)
            if hits:
                break
        converted[key] = value
    return converted
