"""Whether vLLM can run a model with given settings, and a CPU engine's KV cache: arithmetic on shapes alone."""

from __future__ import annotations

from transformers import PretrainedConfig

from verl.utils.flops_counter import FlopsCounter
from verl.workers.rollout.settings import EngineSettings

_KEY = "actor_rollout_ref.rollout"
_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_CPU_BLOCK = 128  # tokens per KV block of the CPU backend
_CPU_KV_CAP = 512 << 20  # bytes; the CPU backend touches all of it at start
_CPU_KV_ROWS = 64  # sequences of full length that the CPU cache is made for, as far as the cap allows
_ROOMY = 0.25  # share of an engine's memory that the weights may take where the KV cache is to have room enough


def check_model(config: PretrainedConfig, settings: EngineSettings) -> None:
    """Refuse a model that vLLM could not run with these settings; ValueError naming the key."""
    text = config.get_text_config()
    heads, tensor_parallel = text.num_attention_heads, settings.tensor_parallel_size
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % tensor_parallel or (kv_heads % tensor_parallel and tensor_parallel % kv_heads):
        raise ValueError(
            f"{_KEY}.tensor_model_parallel_size={tensor_parallel} does not divide the model's {heads} attention heads "
            f"and {kv_heads} key/value heads"
        )
    intermediate = getattr(text, "intermediate_size", None) or 0
    if intermediate % tensor_parallel:
        raise ValueError(
            f"{_KEY}.tensor_model_parallel_size={tensor_parallel} does not divide the model's intermediate_size="
            f"{intermediate}; use {_KEY}.tensor_model_parallel_size=1"
        )
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    if settings.device == "cpu" and head_dim not in _CPU_HEAD_DIMS:
        raise ValueError(
            f"actor_rollout_ref.model.path: vLLM on CPU has no attention for head_dim={head_dim}; it supports "
            f"{', '.join(map(str, _CPU_HEAD_DIMS))}. Use another model or {_KEY}.name=hf"
        )
    rope = getattr(text, "rope_scaling", None) or getattr(text, "rope_parameters", None) or {}
    limit = getattr(text, "max_position_embeddings", None)
    if limit and rope.get("rope_type", "default") == "default" and settings.max_model_len > limit:
        raise ValueError(
            f"{_KEY}.max_model_len={settings.max_model_len} is beyond the {limit} positions the model was made for; "
            "lower data.max_prompt_length + data.max_response_length"
        )


def parallel_hint(config: PretrainedConfig, settings: EngineSettings, device_bytes: int) -> str | None:
    """What to say where engines of one GPU each would sample faster than tensor parallelism; None where not.

    device_bytes: memory of one GPU. A model whose weights take up to a quarter of what one engine may use leaves the KV
    cache room enough, and then ranks that need not talk to each other at every layer win.
    """
    text = config.get_text_config()
    counter = FlopsCounter(config)
    heads = 1 if getattr(text, "tie_word_embeddings", False) else 2
    parameters = counter.layers * counter.layer_parameters() + heads * counter.vocabulary * counter.hidden
    weights = parameters * settings.dtype.itemsize
    if settings.tensor_parallel_size < 2 or weights > _ROOMY * settings.gpu_memory_utilization * device_bytes:
        return None
    if getattr(text, "num_experts_per_tok", None):  # the weights of experts are many more than those a token sees
        return None
    return (
        f"{_KEY}.tensor_model_parallel_size={settings.tensor_parallel_size}, but one GPU has room for an engine of its "
        f"own ({weights / 2**30:.1f} GiB of weights): {_KEY}.tensor_model_parallel_size=1 samples faster, on two H200 "
        "about twice as many tokens a second at 1.5 B parameters (docs/performance.md)"
    )


def sleep_hint(settings: EngineSettings, recomputed: int, layers: int) -> str | None:
    """What to say where an engine that stays awake leaves so little memory that a quarter of the trainer's layers or
    more are recomputed in an update; None where not."""
    if settings.device != "cuda" or settings.free_cache_engine or 4 * recomputed < layers:
        return None
    return (
        f"{recomputed} of {layers} layers are recomputed in every update for want of memory, while the rollout engine "
        f"keeps what it has: {_KEY}.free_cache_engine=true lets it give that back, for some tenths of a second a step"
    )


def cpu_kv_cache_bytes(config: PretrainedConfig, settings: EngineSettings) -> int:
    """Bytes of KV cache for a CPU engine.

    As asked for, else room for 64 sequences of full length within 512 MiB; never less than one sequence.
    """
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = max(1, (getattr(text, "num_key_value_heads", None) or heads) // settings.tensor_parallel_size)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    per_block = 2 * text.num_hidden_layers * kv_heads * head_dim * settings.dtype.itemsize * _CPU_BLOCK
    blocks_per_row = -(-settings.max_model_len // _CPU_BLOCK)
    wanted = min(per_block * blocks_per_row * min(settings.max_num_seqs, _CPU_KV_ROWS), _CPU_KV_CAP)
    if settings.kv_cache_memory_mb is not None:
        wanted = settings.kv_cache_memory_mb << 20
    return max(wanted, per_block * (blocks_per_row + 2))
