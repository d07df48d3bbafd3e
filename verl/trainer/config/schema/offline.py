"""The typed forms of ``generation.yaml`` and ``evaluation.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from verl.trainer.config.schema.critic import CustomRewardFunctionConfig
from verl.trainer.config.schema.node import ConfigNode
from verl.trainer.config.schema.rollout import EngineKwargsConfig
from verl.trainer.config.schema.trainer import RayInitConfig


@dataclass(frozen=True, kw_only=True)
class GenerationRunConfig(ConfigNode):
    """Machines and time limits (seconds)."""

    nnodes: int
    n_gpus_per_node: int
    device: Literal["auto", "cuda", "cpu"]
    start_timeout: float
    step_timeout: float
    ray_wait_register_center_timeout: int
    compile_cache_dir: str | None
    progress_bar: bool


@dataclass(frozen=True, kw_only=True)
class GenerationDataConfig(ConfigNode):
    """Prompts in, responses out."""

    path: str | list[str] | None
    prompt_key: str
    n_samples: int
    output_path: str | None
    batch_size: int
    truncation: Literal["error", "left", "right", "middle"]
    apply_chat_template_kwargs: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class GenerationModelConfig(ConfigNode):
    """The model that answers."""

    path: str | None
    use_shm: bool
    external_lib: str | list[str] | None
    trust_remote_code: bool


@dataclass(frozen=True, kw_only=True)
class GenerationRolloutConfig(ConfigNode):
    """Sampling and the engine, as far as generation needs them of ``RolloutConfig``."""

    name: Literal["vllm", "hf"]
    mode: str
    seed: int
    temperature: float
    top_k: int
    top_p: float
    do_sample: bool
    n: int
    prompt_length: int
    response_length: int
    max_model_len: int | None
    dtype: Literal["bfloat16", "float16", "float32", "auto", "bf16", "fp16", "fp32"]
    gpu_memory_utilization: float
    ignore_eos: bool
    enforce_eager: bool
    free_cache_engine: bool
    load_format: str
    tensor_model_parallel_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    kv_cache_memory_mb: int | None
    max_steps_per_slice: int
    enable_chunked_prefill: bool
    disable_log_stats: bool
    log_prob_micro_batch_size: int | None
    log_prob_micro_batch_size_per_gpu: int | None
    engine_kwargs: EngineKwargsConfig

    @property
    def ranks_per_engine(self) -> int:
        """Ranks that share an engine: ``tensor_model_parallel_size`` with vLLM, 1 with transformers."""
        return self.tensor_model_parallel_size if self.name == "vllm" else 1


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(ConfigNode):
    """``verl.trainer.main_generation``."""

    trainer: GenerationRunConfig
    data: GenerationDataConfig
    model: GenerationModelConfig
    rollout: GenerationRolloutConfig
    actor: Mapping[str, Any]
    ray_init: RayInitConfig
    added_keys: list[str]

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node


@dataclass(frozen=True, kw_only=True)
class EvaluationDataConfig(ConfigNode):
    """Where responses and what they are judged by lie."""

    path: str | list[str] | None
    prompt_key: str
    response_key: str
    data_source_key: str
    reward_model_key: str
    output_path: str | None


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(ConfigNode):
    """``verl.trainer.main_eval``."""

    data: EvaluationDataConfig
    custom_reward_function: CustomRewardFunctionConfig
    reward_timeout: float
    ray_init: RayInitConfig
    added_keys: list[str]
