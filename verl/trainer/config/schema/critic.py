"""``critic``, ``reward_model`` and ``custom_reward_function``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl.trainer.config.schema.actor import (
    CheckpointConfig,
    FSDPConfig,
    FSDPInferenceConfig,
    LossAggMode,
    OptimConfig,
    Strategy,
)
from verl.trainer.config.schema.node import ConfigNode


@dataclass(frozen=True, kw_only=True)
class CriticModelConfig(ConfigNode):
    """The value network's model."""

    path: str | None
    use_shm: bool
    tokenizer_path: str | None
    override_config: Mapping[str, Any]
    external_lib: str | list[str] | None
    enable_gradient_checkpointing: bool
    enable_activation_offload: bool
    use_remove_padding: bool
    trust_remote_code: bool
    fsdp_config: FSDPConfig
    lora_rank: int
    lora_alpha: float
    target_modules: str | list[str]


@dataclass(frozen=True, kw_only=True)
class CriticConfig(ConfigNode):
    """The value network and its update; whether there is one, ``PPOTrainerConfig.uses_critic`` says."""

    enable: bool | None
    rollout_n: int
    strategy: Strategy
    optim: OptimConfig
    model: CriticModelConfig
    ppo_mini_batch_size: int
    ppo_micro_batch_size: int | None
    ppo_micro_batch_size_per_gpu: int | None
    forward_micro_batch_size: int | None
    forward_micro_batch_size_per_gpu: int | None
    use_dynamic_bsz: bool
    ppo_max_token_len_per_gpu: int
    forward_max_token_len_per_gpu: int
    ulysses_sequence_parallel_size: int
    ppo_epochs: int
    shuffle: bool
    grad_clip: float
    cliprange_value: float
    loss_agg_mode: LossAggMode
    checkpoint: CheckpointConfig


@dataclass(frozen=True, kw_only=True)
class RewardModelModelConfig(ConfigNode):
    """The reward model's model."""

    input_tokenizer: str | None
    path: str | None
    use_shm: bool
    external_lib: str | list[str] | None
    use_remove_padding: bool
    use_fused_kernels: bool
    trust_remote_code: bool
    fsdp_config: FSDPInferenceConfig


@dataclass(frozen=True, kw_only=True)
class SandboxFusionConfig(ConfigNode):
    """Kept for scripts written for other trainers."""

    url: str | None
    max_concurrent: int


@dataclass(frozen=True, kw_only=True)
class OverlongBufferConfig(ConfigNode):
    """Soft penalty of responses that near ``data.max_response_length``."""

    enable: bool
    len: int
    penalty_factor: float


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(ConfigNode):
    """How a row gets its reward."""

    enable: bool
    strategy: Strategy
    model: RewardModelModelConfig
    micro_batch_size: int | None
    micro_batch_size_per_gpu: int | None
    max_length: int | None
    ulysses_sequence_parallel_size: int
    use_dynamic_bsz: bool
    forward_max_token_len_per_gpu: int
    reward_manager: str
    overlong_buffer: OverlongBufferConfig
    launch_reward_fn_async: bool
    sandbox_fusion: SandboxFusionConfig


@dataclass(frozen=True, kw_only=True)
class CustomRewardFunctionConfig(ConfigNode):
    """A reward function of the user's own."""

    path: str | None
    name: str
