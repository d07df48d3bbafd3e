"""From the rollout section of the config to what an engine needs: engine settings and sampling settings.

Everything that can be known to be wrong before an engine is built is refused here, with the key to change. Keys are
those of `actor_rollout_ref.rollout`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from verl.utils.model import update_model_config
from verl.workers.rollout.base import SamplingSettings

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
}
_KEY = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is built from.

    Lengths and budgets count tokens. The KV cache takes `kv_cache_memory_mb` MiB, or, where that is None, what the
    share `gpu_memory_utilization` of the device leaves beside the weights (on CPU: what some 64 full sequences need).
    `requests` is how many this engine is expected to have at once, None if that is not known; more of them work too.
    """

    model_path: str
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    eos_token_ids: tuple[int, ...] = ()
    max_model_len: int = 1024
    tensor_parallel_size: int = 1
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enable_chunked_prefill: bool = True
    gpu_memory_utilization: float = 0.5
    kv_cache_memory_mb: int | None = None
    enforce_eager: bool = True
    free_cache_engine: bool = True
    load_format: str = "dummy"
    disable_log_stats: bool = True
    trust_remote_code: bool = False
    seed: int = 0
    requests: int | None = None
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def load_hf_config(self) -> PretrainedConfig:
        """The model's configuration with the overrides applied."""
        config = AutoConfig.from_pretrained(self.model_path, trust_remote_code=self.trust_remote_code)
        update_model_config(config, dict(self.hf_overrides))
        return config


def resolve_dtype(name: str | torch.dtype, device: str) -> torch.dtype:
    """`auto` means float32 on CPU, bfloat16 elsewhere."""
    if isinstance(name, torch.dtype):
        return name
    if name == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    try:
        return _DTYPES[name]
    except KeyError:
        raise ValueError(f"{_KEY}.dtype={name!r} is unknown; choose one of auto, {', '.join(_DTYPES)}") from None


def _largest_share(requests: int, engines: int) -> int:
    """What an engine of several may have of so many requests: they are balanced over engines only roughly."""
    share = -(-requests // engines)
    return share if engines == 1 else share + share // 4 + 4


def engine_settings(
    rollout: Any,
    model_path: str,
    *,
    device: str,
    eos_token_ids: Sequence[int] = (),
    seed: int = 0,
    trust_remote_code: bool = False,
    hf_overrides: Mapping[str, Any] | None = None,
    world_size: int = 1,
    requests: int | None = None,
) -> EngineSettings:
    """Read the rollout section of the config.

    rollout: `actor_rollout_ref.rollout` of the config, its keys as attributes.
    world_size: ranks of the job; `tensor_model_parallel_size` must divide it.
    requests: the most that all engines together are expected to have at once, if that is known.
    Raises ValueError naming the key.
    """
    longest = rollout.prompt_length + rollout.response_length
    max_model_len = rollout.max_model_len or longest
    if max_model_len < longest:
        raise ValueError(
            f"{_KEY}.max_model_len={max_model_len} is smaller than prompt_length + response_length = {longest}; "
            "raise it, leave it null, or lower data.max_prompt_length / data.max_response_length"
        )
    tensor_parallel = rollout.ranks_per_engine
    if tensor_parallel < 1 or world_size % tensor_parallel:
        raise ValueError(
            f"{_KEY}.tensor_model_parallel_size={tensor_parallel} does not divide the {world_size} rank(s) of this job "
            "(trainer.n_gpus_per_node * trainer.nnodes)"
        )
    if not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < max_model_len:
        raise ValueError(
            f"{_KEY}.max_num_batched_tokens={rollout.max_num_batched_tokens} is smaller than "
            f"max_model_len={max_model_len}, which works only with enable_chunked_prefill=True"
        )
    if not 0 < rollout.gpu_memory_utilization <= 1:
        raise ValueError(f"{_KEY}.gpu_memory_utilization={rollout.gpu_memory_utilization} must lie in (0, 1]")
    return EngineSettings(
        model_path=model_path,
        device=device,
        dtype=resolve_dtype(rollout.dtype, device),
        eos_token_ids=tuple(int(token) for token in eos_token_ids),
        max_model_len=max_model_len,
        tensor_parallel_size=tensor_parallel,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        enable_chunked_prefill=rollout.enable_chunked_prefill,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        kv_cache_memory_mb=rollout.kv_cache_memory_mb,
        enforce_eager=rollout.enforce_eager,
        free_cache_engine=rollout.free_cache_engine,
        load_format=rollout.load_format,
        disable_log_stats=rollout.disable_log_stats,
        trust_remote_code=trust_remote_code,
        seed=seed,
        requests=None if requests is None else _largest_share(requests, world_size // tensor_parallel),
        hf_overrides=dict(hf_overrides or {}),
        engine_kwargs={
            key: value
            for key, value in rollout.engine_kwargs.vllm.items()
            if value is not None and key != "swap_space"  # which vLLM has no more; old scripts set it
        },
    )


def sampling_settings(rollout: Any, validate: bool = False, do_sample: bool = True) -> SamplingSettings:
    """How the config asks responses to be drawn: `rollout.*`, or `rollout.val_kwargs.*` when validating.

    `do_sample=False`, there or from the caller, is greedy decoding whatever the temperature says. Keys added with a
    plus go to the engine's sampling parameters by their name; those of `rollout` hold in validation too.
    """
    source = rollout.val_kwargs if validate else rollout
    sample = do_sample and source.do_sample
    return SamplingSettings(
        temperature=float(source.temperature) if sample else 0.0,
        top_p=float(source.top_p) if sample else 1.0,
        top_k=int(source.top_k) if sample else -1,
        max_tokens=rollout.response_length,
        ignore_eos=rollout.ignore_eos,
        extra={**rollout.extra, **source.extra},
    )


def check_requests(requests: Sequence[Any], max_model_len: int, vocab_size: int) -> None:
    """Refuse requests that no engine could serve, before any of them is added."""
    for request in requests:
        length = len(request.prompt_ids)
        if length == 0:
            raise ValueError(f"request {request.request_id} has an empty prompt")
        if length >= max_model_len:
            raise ValueError(
                f"request {request.request_id}: a prompt of {length} tokens leaves no room for a response within "
                f"{_KEY}.max_model_len={max_model_len}; lower data.max_prompt_length or choose another data.truncation"
            )
        lowest, highest = int(request.prompt_ids.min()), int(request.prompt_ids.max())
        if lowest < 0 or highest >= vocab_size:
            raise ValueError(
                f"request {request.request_id}: token ids {lowest}..{highest} lie outside the model's vocabulary of "
                f"{vocab_size}; the tokenizer and actor_rollout_ref.model.path do not belong together"
            )
