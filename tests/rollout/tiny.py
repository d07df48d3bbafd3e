"""A tiny Qwen2 whose greedy choices are far apart, processes to run engines in, and the trainer's view of log-probs."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.workers.ranks import rank_processes, take_environment
from verl.utils.net_utils import get_free_port
from verl.workers.rollout.base import RolloutRequest, SamplingSettings
from verl.workers.rollout.settings import EngineSettings

EOS = 3
VOCABULARY = 512
MAX_MODEL_LEN = 256
GREEDY = SamplingSettings(temperature=0.0, max_tokens=24)
SAMPLED = SamplingSettings(temperature=0.7, max_tokens=24)


def build_model(seed: int = 0, tied: bool = True) -> Qwen2ForCausalLM:
    """427 k parameters, head_dim 32 (the least that vLLM's CPU attention has)."""
    config = Qwen2Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        eos_token_id=EOS,
    )
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config).eval()


def save_config(folder: Path, tied: bool = True) -> str:
    """A model folder without weights: engines get theirs by sync."""
    build_model(tied=tied).config.save_pretrained(folder)
    return str(folder)


def settings(folder: str, **changes: Any) -> EngineSettings:
    values = {"eos_token_ids": (EOS,), "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 32, **changes}
    return EngineSettings(folder, **values)


def requests(count: int, sampling: SamplingSettings, name: str = "r", first_seed: int = 0) -> list[RolloutRequest]:
    """Prompts of 8, 13, 18, ... random tokens; request i depends on i alone."""
    return [
        RolloutRequest(
            f"{name}{i}",
            np.random.default_rng(i).integers(4, VOCABULARY, size=8 + 5 * i % 60, dtype=np.int32),
            sampling,
            seed=first_seed + i,
        )
        for i in range(count)
    ]


@torch.no_grad()
def log_probs_of(model: torch.nn.Module, prompt: np.ndarray, response: np.ndarray, temperature: float) -> np.ndarray:
    """log softmax(logits / temperature) of the response tokens, (response_length,)."""
    tokens = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
    logits = model(input_ids=tokens[None]).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, tokens[len(prompt) :, None])[:, 0].numpy()


def score_fn(model: torch.nn.Module) -> Callable[[list[np.ndarray]], list[np.ndarray]]:
    return lambda rows: [log_probs_of(model, row[:1], row[1:], 1.0) for row in rows]


@torch.no_grad()
def greedy_tokens(model: torch.nn.Module, prompt: np.ndarray, steps: int) -> list[int]:
    """Second method: argmax token after token, no cache."""
    tokens = prompt.astype(np.int64).tolist()
    for _ in range(steps):
        tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


def rollout_config(**changes: Any) -> SimpleNamespace:
    """`actor_rollout_ref.rollout` as an engine reads it."""
    values = {
        "name": "vllm",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "do_sample": True,
        "ignore_eos": False,
        "prompt_length": 64,
        "response_length": 32,
        "max_model_len": None,
        "dtype": "float32",
        "tensor_model_parallel_size": 1,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "enable_chunked_prefill": True,
        "gpu_memory_utilization": 0.5,
        "kv_cache_memory_mb": None,
        "enforce_eager": True,
        "free_cache_engine": True,
        "load_format": "dummy_dtensor",
        "disable_log_stats": True,
        "engine_kwargs": SimpleNamespace(vllm={}),
        "val_kwargs": SimpleNamespace(temperature=0, top_p=1.0, top_k=-1, do_sample=False, extra={}),
        "extra": {},
    }
    assert set(changes) <= set(values)
    values.update(changes)
    ranks = values["tensor_model_parallel_size"] if values["name"] == "vllm" else 1
    return SimpleNamespace(**values, ranks_per_engine=ranks)


class Ranks:
    """`world_size` processes that keep their state between calls; functions are module-level and run on all at once.

    An engine lives as long as its process, so it never lives in the process of the tests.
    """

    def __init__(self, world_size: int = 1) -> None:
        port = get_free_port()
        self._pools = [
            ProcessPoolExecutor(
                1, rank_processes(), initializer=_enter_rank, initargs=(rank, world_size, port, dict(os.environ))
            )
            for rank in range(world_size)
        ]

    def __call__(self, function: Callable, *args: Any, timeout: float = 300) -> list[Any]:
        """Results in rank order; the first error is raised here."""
        futures = [pool.submit(function, *args) for pool in self._pools]
        return [future.result(timeout=timeout) for future in futures]

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown(wait=True, cancel_futures=True)


def _enter_rank(rank: int, world_size: int, port: int, environment: dict[str, str]) -> None:
    take_environment(environment)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
