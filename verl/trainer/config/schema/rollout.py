"""``actor_rollout_ref.rollout``: sampling and the rollout engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from verl.trainer.config.schema.node import ConfigNode


@dataclass(frozen=True, kw_only=True)
class EngineKwargsConfig(ConfigNode):
    """Arguments handed to the engine's constructor as they are."""

    vllm: Mapping[str, Any]
    sglang: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ValSamplingConfig(ConfigNode):
    """Sampling in validation."""

    top_k: int
    top_p: float
    temperature: float
    n: int
    do_sample: bool


@dataclass(frozen=True, kw_only=True)
class MultiTurnConfig(ConfigNode):
    """Kept for scripts written for other trainers; every rollout here is multi-turn."""

    enable: bool
    max_turns: int | None
    tool_config_path: str | None
    format: str


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(ConfigNode):
    """Sampling in training and the engine. Keys added with a plus go to the engine's sampling parameters."""

    name: Literal["vllm", "hf"]
    mode: Literal["sync", "async"]
    chat_scheduler: str | None
    seed: int
    temperature: float
    top_k: int
    top_p: float
    do_sample: bool
    n: int
    use_fire_sampling: bool
    prompt_length: int
    response_length: int
    max_model_len: int | None
    dtype: Literal["bfloat16", "float16", "float32", "auto", "bf16", "fp16", "fp32"]
    gpu_memory_utilization: float
    ignore_eos: bool
    enforce_eager: bool
    free_cache_engine: bool
    load_format: str
    layered_summon: bool
    tensor_model_parallel_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    kv_cache_memory_mb: int | None
    max_steps_per_slice: int
    enable_chunked_prefill: bool
    disable_log_stats: bool
    log_prob_micro_batch_size: int | None
    log_prob_micro_batch_size_per_gpu: int | None
    log_prob_use_dynamic_bsz: bool
    log_prob_max_token_len_per_gpu: int
    probe_tolerance: float | None
    engine_kwargs: EngineKwargsConfig
    val_kwargs: ValSamplingConfig
    multi_turn: MultiTurnConfig

    @property
    def ranks_per_engine(self) -> int:
        """Ranks that share an engine: ``tensor_model_parallel_size`` with vLLM, 1 with transformers."""
        return self.tensor_model_parallel_size if self.name == "vllm" else 1
