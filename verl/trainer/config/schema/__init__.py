"""Typed, frozen view of ``ppo_trainer.yaml``: one dataclass a node, one module a branch.

Nothing in the program reads a DictConfig: ``verl.trainer.config.to_dataclass`` makes a :class:`PPOTrainerConfig`
right after composition. Change a value with ``dataclasses.replace``.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl.trainer.config.group_size import train_group_size, val_group_size
from verl.trainer.config.schema.actor import (
    ActorConfig,
    ActorRolloutRefConfig,
    CheckpointConfig,
    FSDPConfig,
    FSDPInferenceConfig,
    MixedPrecisionConfig,
    ModelConfig,
    OptimConfig,
    PolicyLossConfig,
    RefConfig,
    WrapPolicyConfig,
)
from verl.trainer.config.schema.algorithm import (
    AlgorithmConfig,
    FilterGroupsConfig,
    GiGPOConfig,
    HGPOConfig,
    KLControlConfig,
    PFPPOConfig,
)
from verl.trainer.config.schema.critic import (
    CriticConfig,
    CriticModelConfig,
    CustomRewardFunctionConfig,
    OverlongBufferConfig,
    RewardModelConfig,
    RewardModelModelConfig,
    SandboxFusionConfig,
)
from verl.trainer.config.schema.data import CustomClsConfig, DataConfig
from verl.trainer.config.schema.env import (
    AlfworldConfig,
    EnvConfig,
    EnvResourcesConfig,
    EnvRolloutConfig,
    SearchConfig,
    SokobanConfig,
    WebshopConfig,
)
from verl.trainer.config.schema.node import ConfigNode
from verl.trainer.config.schema.rollout import (
    EngineKwargsConfig,
    MultiTurnConfig,
    RolloutConfig,
    ValSamplingConfig,
)
from verl.trainer.config.schema.trainer import RayInitConfig, TrainerConfig

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AlfworldConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "ConfigNode",
    "CriticConfig",
    "CriticModelConfig",
    "CustomClsConfig",
    "CustomRewardFunctionConfig",
    "DataConfig",
    "EngineKwargsConfig",
    "EnvConfig",
    "EnvResourcesConfig",
    "EnvRolloutConfig",
    "FSDPConfig",
    "FSDPInferenceConfig",
    "FilterGroupsConfig",
    "GiGPOConfig",
    "HGPOConfig",
    "KLControlConfig",
    "MixedPrecisionConfig",
    "ModelConfig",
    "MultiTurnConfig",
    "OptimConfig",
    "OverlongBufferConfig",
    "PFPPOConfig",
    "PPOTrainerConfig",
    "PolicyLossConfig",
    "RayInitConfig",
    "RefConfig",
    "RewardModelConfig",
    "RewardModelModelConfig",
    "RolloutConfig",
    "SandboxFusionConfig",
    "SearchConfig",
    "SokobanConfig",
    "TrainerConfig",
    "ValSamplingConfig",
    "WebshopConfig",
    "WrapPolicyConfig",
]


@dataclass(frozen=True, kw_only=True)
class PPOTrainerConfig(ConfigNode):
    """The whole configuration of a training run."""

    preset: str
    added_keys: list[str]
    explain: bool
    data: DataConfig
    actor_rollout_ref: ActorRolloutRefConfig
    critic: CriticConfig
    reward_model: RewardModelConfig
    custom_reward_function: CustomRewardFunctionConfig
    algorithm: AlgorithmConfig
    trainer: TrainerConfig
    ray_init: RayInitConfig
    env: EnvConfig

    @property
    def world_size(self) -> int:
        """Ranks of the run: ``trainer.nnodes * trainer.n_gpus_per_node``."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def requests_at_once(self) -> int:
        """The most requests that a rollout has under way: one of each episode of a training or validation batch."""
        tasks = self.data.gen_batch_size or self.data.train_batch_size
        return max(tasks * train_group_size(self), (self.data.val_batch_size or 0) * val_group_size(self))

    @property
    def uses_reference(self) -> bool:
        """Whether log-probabilities of the reference policy are needed."""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss

    @property
    def uses_critic(self) -> bool:
        """Whether a value network is trained: ``critic.enable``, and where that is null the estimator decides."""
        return self.critic.enable if self.critic.enable is not None else self.algorithm.adv_estimator == "gae"
