"""``actor_rollout_ref``: the policy, its reference and the loss; the rollout engine is in ``rollout.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from verl.trainer.config.schema.node import ConfigNode
from verl.trainer.config.schema.rollout import RolloutConfig

Strategy = Literal["fsdp", "fsdp2", "megatron"]
Dtype = Literal["fp32", "bf16", "fp16", "float32", "bfloat16", "float16"]
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLKind = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
CheckpointContent = Literal["model", "optimizer", "extra", "hf_model"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ConfigNode):
    """The policy's model and how it is made trainable."""

    path: str | None
    use_shm: bool
    external_lib: str | list[str] | None
    override_config: Mapping[str, Any]
    enable_gradient_checkpointing: bool
    enable_activation_offload: bool
    use_remove_padding: bool
    lora_rank: int
    lora_alpha: float
    target_modules: str | list[str]
    use_liger: bool
    use_fused_kernels: bool
    trust_remote_code: bool


@dataclass(frozen=True, kw_only=True)
class OptimConfig(ConfigNode):
    """AdamW and the learning-rate schedule, counted in training steps."""

    lr: float
    lr_warmup_steps: int
    lr_warmup_steps_ratio: float
    min_lr_ratio: float | None
    num_cycles: float
    warmup_style: Literal["constant", "cosine"]
    total_training_steps: int
    weight_decay: float
    betas: list[float]


@dataclass(frozen=True, kw_only=True)
class WrapPolicyConfig(ConfigNode):
    """Which modules become FSDP units."""

    min_num_params: int
    transformer_layer_cls_to_wrap: str | list[str] | None


@dataclass(frozen=True, kw_only=True)
class MixedPrecisionConfig(ConfigNode):
    """Dtypes of compute, gradient reduction and buffers."""

    param_dtype: Dtype
    reduce_dtype: Dtype
    buffer_dtype: Dtype


@dataclass(frozen=True, kw_only=True)
class FSDPInferenceConfig(ConfigNode):
    """Sharding of a model that is not trained."""

    wrap_policy: WrapPolicyConfig
    param_offload: bool
    reshard_after_forward: bool
    fsdp_size: int
    model_dtype: Dtype
    mixed_precision: MixedPrecisionConfig


@dataclass(frozen=True, kw_only=True)
class FSDPConfig(FSDPInferenceConfig):
    """Sharding of a model that is trained."""

    optimizer_offload: bool
    offload_policy: bool


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(ConfigNode):
    """What a checkpoint holds."""

    contents: list[CheckpointContent]


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig(ConfigNode):
    """The policy loss by name and the settings of those that have any."""

    loss_mode: str
    clip_cov_ratio: float
    clip_cov_lb: float
    clip_cov_ub: float
    kl_cov_ratio: float
    ppo_kl_coef: float


@dataclass(frozen=True, kw_only=True)
class ActorConfig(ConfigNode):
    """The update of the policy. Mini-batch sizes count rows (agent steps) over all ranks."""

    strategy: Strategy
    ppo_mini_batch_size: int
    ppo_micro_batch_size: int | None
    ppo_micro_batch_size_per_gpu: int | None
    use_dynamic_bsz: bool
    ppo_max_token_len_per_gpu: int
    grad_clip: float
    clip_ratio: float
    clip_ratio_low: float | None
    clip_ratio_high: float | None
    clip_ratio_c: float
    loss_agg_mode: LossAggMode
    loss_scale_factor: float | None
    entropy_coeff: float
    use_invalid_action_penalty: bool
    invalid_action_penalty_coef: float
    use_kl_loss: bool
    kl_loss_coef: float
    kl_loss_type: KLKind
    use_torch_compile: bool
    tis_cap: float | None
    ppo_epochs: int
    shuffle: bool
    ulysses_sequence_parallel_size: int
    policy_loss: PolicyLossConfig
    checkpoint: CheckpointConfig
    optim: OptimConfig
    fsdp_config: FSDPConfig


@dataclass(frozen=True, kw_only=True)
class RefConfig(ConfigNode):
    """The reference policy of the KL terms."""

    strategy: Strategy
    fsdp_config: FSDPInferenceConfig
    use_torch_compile: bool
    log_prob_micro_batch_size: int | None
    log_prob_micro_batch_size_per_gpu: int | None
    log_prob_use_dynamic_bsz: bool
    log_prob_max_token_len_per_gpu: int
    ulysses_sequence_parallel_size: int


@dataclass(frozen=True, kw_only=True)
class ActorRolloutRefConfig(ConfigNode):
    """Everything a rank needs that trains, samples from or refers to the policy."""

    hybrid_engine: bool
    model: ModelConfig
    actor: ActorConfig
    ref: RefConfig
    rollout: RolloutConfig
