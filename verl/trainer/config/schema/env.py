"""``env``: the environment by name, its episodes and the settings of each environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl.trainer.config.schema.node import ConfigNode


@dataclass(frozen=True, kw_only=True)
class EnvResourcesConfig(ConfigNode):
    """Ray resources counted per environment."""

    num_cpus: float
    num_gpus: float


@dataclass(frozen=True, kw_only=True)
class EnvRolloutConfig(ConfigNode):
    """Group size: episodes per task."""

    n: int


@dataclass(frozen=True, kw_only=True)
class AlfworldConfig(ConfigNode):
    """ALFWorld."""

    eval_dataset: Literal["eval_in_distribution", "eval_out_of_distribution"]


@dataclass(frozen=True, kw_only=True)
class SearchConfig(ConfigNode):
    """Question answering with a retriever."""

    log_requests: bool
    search_url: str | list[str]
    topk: int
    timeout: float


@dataclass(frozen=True, kw_only=True)
class SokobanConfig(ConfigNode):
    """Sokoban."""

    dim_room: list[int]
    num_boxes: int
    search_depth: int
    mode: Literal["tiny_rgb_array", "rgb_array", "list", "state"]


@dataclass(frozen=True, kw_only=True)
class WebshopConfig(ConfigNode):
    """WebShop: its data and its rules."""

    use_small: bool
    human_goals: bool
    data_dir: str | None
    num_products: int | None
    seed: int
    cache_dir: str
    show_attrs: bool
    validation_goals: int
    limit_goals: int | None
    noun_source: str
    build_timeout: float
    original_quirks: bool
    penalise_inadmissible: bool
    compat_seeding: bool


@dataclass(frozen=True, kw_only=True)
class EnvConfig(ConfigNode):
    """Episodes and the environment they are played in."""

    env_name: str
    seed: int
    split_digest: str | None
    max_steps: int
    history_length: int
    max_prompt_chars: int
    step_timeout: float
    reset_timeout: float
    num_workers: int | None
    resources_per_worker: EnvResourcesConfig
    rollout: EnvRolloutConfig
    alfworld: AlfworldConfig
    search: SearchConfig
    sokoban: SokobanConfig
    webshop: WebshopConfig
