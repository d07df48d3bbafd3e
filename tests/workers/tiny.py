"""Tiny random models and rows for worker tests. Head dimension 32, as the CPU rollout engine needs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from verl.protocol import DataProto
from verl.trainer.config import default_config
from verl.trainer.config.schema import PPOTrainerConfig

VOCABULARY = 97
CONFIGS = {"qwen2": (Qwen2Config, True), "qwen3": (Qwen3Config, True), "llama": (LlamaConfig, False)}


def tiny_config(family: str = "qwen2", layers: int = 2) -> PretrainedConfig:
    kind, tied = CONFIGS[family]
    return kind(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=tied,
        max_position_embeddings=128,
        initializer_range=0.2,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )


def save_tiny_model(folder: Path, family: str = "qwen2", seed: int = 0, layers: int = 2) -> str:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(tiny_config(family, layers)).save_pretrained(folder)
    return str(folder)


def random_rows(count: int, seed: int = 0, longest: int = 9) -> DataProto:
    """Rows with everything an update needs; lengths vary, one response fills the width."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, count)
    lengths[0] = longest
    responses = torch.zeros(count, longest, dtype=torch.int64)
    mask = torch.zeros(count, longest, dtype=torch.int64)
    prompts = np.empty(count, dtype=object)
    for i, n in enumerate(lengths):
        responses[i, :n] = torch.from_numpy(rng.integers(2, VOCABULARY, n))
        mask[i, :n] = 1
        prompts[i] = rng.integers(2, VOCABULARY, rng.integers(2, 12)).astype(np.int32)

    def noise(scale: float, shift: float = 0.0) -> torch.Tensor:
        return torch.from_numpy(rng.normal(shift, scale, mask.shape).astype(np.float32)) * mask

    return DataProto.from_dict(
        tensors={
            "responses": responses,
            "response_mask": mask,
            "prompt_length": torch.tensor([len(p) for p in prompts]),
            "old_log_probs": noise(1.0, -4.5),
            "ref_log_prob": noise(1.0, -4.5),
            "rollout_log_probs": noise(1.0, -4.5),
            "advantages": noise(1.0),
            "values": noise(0.5),
            "returns": noise(1.0),
        },
        non_tensors={"prompt_ids": prompts, "uid": np.array([str(i) for i in range(count)], dtype=object)},
        meta_info={"temperature": 0.8},
    )


def embedded_config(*overrides: str) -> PPOTrainerConfig:
    return default_config("preset=embedded", *overrides)


def actor_config(**changes: Any) -> Any:
    """``actor_rollout_ref.actor`` of the CPU preset with changes."""
    return dataclasses.replace(embedded_config().actor_rollout_ref.actor, **changes)


def save_tiny_tokenizer(folder: Path) -> None:
    """One token per word ``w2 … w96``; ``<pad>`` 0, ``<eos>`` 1."""
    vocabulary = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    core = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
