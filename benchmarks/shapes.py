"""Shapes of the models that benchmarks fill with random weights."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

SHAPES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "1.5b": (  # Qwen2.5-1.5B
        Qwen2Config,
        dict(
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            vocab_size=151936,
            tie_word_embeddings=True,
            rope_theta=1e6,
            max_position_embeddings=32768,
        ),
    ),
    "smollm2-135m": (
        LlamaConfig,
        dict(
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            vocab_size=49152,
            tie_word_embeddings=True,
            rope_theta=1e5,
            rms_norm_eps=1e-5,
            max_position_embeddings=8192,
        ),
    ),
    "tiny": (
        Qwen2Config,
        dict(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=1024,
            tie_word_embeddings=True,
        ),
    ),
}


def shape_config(name: str, **changes: Any) -> PretrainedConfig:
    """The transformers config of a shape; ``changes`` replace some of its values."""
    family, values = SHAPES[name]
    return family(**(values | changes))
