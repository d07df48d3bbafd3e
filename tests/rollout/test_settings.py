"""What a user can get wrong in the rollout section is refused with the key to change, before an engine is built."""

from __future__ import annotations

import dataclasses
import os
import sys
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import MixtralConfig, Qwen2Config

from tests.rollout import tiny
from verl.workers.rollout.base import SamplingSettings
from verl.workers.rollout.factory import build_rollout_engine, import_engine
from verl.workers.rollout.model_fit import check_model, cpu_kv_cache_bytes, parallel_hint, sleep_hint
from verl.workers.rollout.settings import EngineSettings, check_requests, engine_settings, sampling_settings
from verl.workers.rollout.vllm_environment import import_vllm, prepare_environment


def test_lengths_default_to_prompt_plus_response() -> None:
    settings = engine_settings(tiny.rollout_config(), "model", device="cpu", eos_token_ids=[3])
    assert settings.max_model_len == 96
    assert settings.dtype == torch.float32 and settings.eos_token_ids == (3,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_model_len": 95}, "max_model_len=95 is smaller than prompt_length"),
        ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size=2 does not divide the 1 rank"),
        ({"tensor_model_parallel_size": 0}, "tensor_model_parallel_size=0"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 64}, "max_num_batched_tokens=64"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization=0.0"),
        ({"dtype": "int7"}, "rollout.dtype='int7'"),
    ],
)
def test_contradictory_sizes_name_their_key(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine_settings(tiny.rollout_config(**changes), "model", device="cpu")


@pytest.mark.parametrize(
    ("ranks", "parallel", "expected"),
    [(1, 1, 128), (2, 2, 128), (2, 1, 64 + 16 + 4), (8, 2, 32 + 8 + 4)],  # docs/rollout.md: 1.25 times, four more
)
def test_an_engine_expects_its_share_of_the_requests(ranks: int, parallel: int, expected: int) -> None:
    config = tiny.rollout_config(tensor_model_parallel_size=parallel)
    assert engine_settings(config, "model", device="cpu", world_size=ranks).requests is None
    assert engine_settings(config, "model", device="cpu", world_size=ranks, requests=128).requests == expected


def test_the_hf_engine_counts_as_one_rank_whatever_the_tensor_parallel_size() -> None:
    config = tiny.rollout_config(name="hf", tensor_model_parallel_size=2)
    assert engine_settings(config, "model", device="cpu", world_size=3).tensor_parallel_size == 1


@pytest.mark.parametrize(("name", "words"), [("sglang", "one process"), ("trt", "choose one of vllm, hf")])
def test_unknown_engines_list_the_known_ones(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_rollout_engine(tiny.rollout_config(name=name), "model", eos_token_ids=[3], device="cpu")


def test_hf_engine_runs_on_one_rank(tmp_path) -> None:
    from verl.workers.rollout.hf_rollout import HFRollout

    with pytest.raises(ValueError, match="tensor_model_parallel_size=2 needs rollout.name=vllm"):
        HFRollout(tiny.settings(tiny.save_config(tmp_path), tensor_parallel_size=2))


def test_engine_arguments_of_vllm_are_passed_on_and_swap_space_that_it_has_no_more_is_not() -> None:
    given = SimpleNamespace(vllm={"swap_space": 4, "block_size": 32, "seed": None})
    settings = engine_settings(tiny.rollout_config(engine_kwargs=given), "model", device="cpu")
    assert settings.engine_kwargs == {"block_size": 32}


def geometry(**changes: int) -> Qwen2Config:
    return Qwen2Config(
        **{"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, **changes}
    )


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (geometry(num_attention_heads=8), {}, "head_dim=16"),
        (geometry(), {"tensor_parallel_size": 3}, "does not divide the model's 4 attention heads"),
        (geometry(intermediate_size=341), {"tensor_parallel_size": 2}, "intermediate_size=341"),
        (
            geometry(num_attention_heads=4, num_key_value_heads=1, max_position_embeddings=64),
            {},
            "beyond the 64 positions",
        ),
    ],
)
def test_models_that_vllm_cannot_run(config: Qwen2Config, changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_model(config, EngineSettings("model", max_model_len=256, **changes))


def test_more_ranks_than_kv_heads_is_fine_when_they_divide() -> None:
    check_model(geometry(), EngineSettings("model", tensor_parallel_size=4))


def test_cpu_kv_cache_follows_the_sizes_within_bounds() -> None:
    per_token = 2 * 2 * 2 * 32 * 4  # keys and values, layers, kv heads, head_dim, bytes
    config = geometry()
    small = EngineSettings("model", max_model_len=256, max_num_seqs=10)
    assert cpu_kv_cache_bytes(config, small) == per_token * 256 * 10
    assert cpu_kv_cache_bytes(config, EngineSettings("model", max_model_len=1 << 20, max_num_seqs=10)) > 512 << 20
    assert cpu_kv_cache_bytes(config, EngineSettings("model", max_model_len=4096, max_num_seqs=4096)) == (
        per_token * 4096 * 64
    )
    asked = EngineSettings("model", max_model_len=256, kv_cache_memory_mb=7)
    assert cpu_kv_cache_bytes(config, asked) == 7 << 20


def test_sampling_follows_training_and_validation_keys() -> None:
    config = tiny.rollout_config(temperature=0.9, top_p=0.8, top_k=5, extra={"min_p": 0.1})
    train = sampling_settings(config)
    assert (train.temperature, train.top_p, train.top_k, train.max_tokens) == (0.9, 0.8, 5, 32)
    assert train.extra == {"min_p": 0.1} and not train.greedy
    assert sampling_settings(config, validate=True).greedy
    config.val_kwargs = SimpleNamespace(temperature=0.4, top_p=0.7, top_k=3, do_sample=True, extra={"min_p": 0.2})
    validation = sampling_settings(config, validate=True)
    assert (validation.temperature, validation.top_p, validation.top_k) == (0.4, 0.7, 3)
    assert validation.extra == {"min_p": 0.2}
    config.do_sample = False
    assert sampling_settings(config).greedy


def test_a_hint_where_engines_of_one_gpu_would_sample_faster() -> None:
    config = Qwen2Config(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
    )

    def hint(tensor_parallel: int, gib: int) -> str | None:
        settings = EngineSettings(
            "model", dtype=torch.bfloat16, tensor_parallel_size=tensor_parallel, gpu_memory_utilization=0.6
        )
        return parallel_hint(config, settings, gib << 30)

    assert "2.9 GiB of weights" in hint(2, 140) and "tensor_model_parallel_size=1 samples faster" in hint(2, 140)
    assert hint(2, 24) is not None  # a quarter of 14.4 GiB
    assert hint(2, 16) is None and hint(1, 140) is None
    experts = MixtralConfig()  # 47 B, of which a token sees 13 B
    awake = EngineSettings("model", dtype=torch.bfloat16, tensor_parallel_size=2, gpu_memory_utilization=0.9)
    assert parallel_hint(experts, awake, 140 << 30) is None


def test_an_engine_that_takes_the_memory_of_activations_is_worth_a_hint() -> None:
    awake = EngineSettings("model", device="cuda", free_cache_engine=False)
    assert "7 of 28 layers" in sleep_hint(awake, 7, 28)
    assert "actor_rollout_ref.rollout.free_cache_engine=true" in sleep_hint(awake, 28, 28)
    assert sleep_hint(awake, 6, 28) is None
    assert sleep_hint(dataclasses.replace(awake, free_cache_engine=True), 28, 28) is None
    assert sleep_hint(dataclasses.replace(awake, device="cpu"), 28, 28) is None


@pytest.mark.parametrize("changes", [{"temperature": -1}, {"top_p": 0.0}, {"top_k": 0}, {"max_tokens": 0}])
def test_impossible_sampling_is_refused(changes: dict) -> None:
    with pytest.raises(ValueError, match="rollout"):
        SamplingSettings(**{"temperature": 1.0, **changes})


def test_requests_that_no_engine_could_serve() -> None:
    (request,) = tiny.requests(1, tiny.GREEDY)
    check_requests([request], max_model_len=9, vocab_size=tiny.VOCABULARY)
    with pytest.raises(ValueError, match="data.max_prompt_length"):
        check_requests([request], max_model_len=8, vocab_size=tiny.VOCABULARY)
    with pytest.raises(ValueError, match="tokenizer"):
        check_requests([request], max_model_len=99, vocab_size=int(request.prompt_ids.max()))
    request.prompt_ids = np.array([], dtype=np.int32)
    with pytest.raises(ValueError, match="empty"):
        check_requests([request], max_model_len=99, vocab_size=tiny.VOCABULARY)


@pytest.mark.parametrize("name, said", [("sglang", "is not supported"), ("trt", "is unknown"), ("vllm", "needs vLLM")])
def test_an_engine_that_cannot_be_imported_is_answered_with_the_key(
    monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it was not installed
    import_vllm.cache_clear()
    with pytest.raises(ValueError, match=f"actor_rollout_ref.rollout.name='?{name}'? {said}"):
        import_engine(name, "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_an_engine_on_cuda_finds_in_the_environment(tmp_path, dtype: torch.dtype) -> None:
    settings = tiny.settings(str(tmp_path), device="cuda", dtype=dtype, free_cache_engine=True)
    with patch.dict(os.environ):
        for name in ("TRITON_F32_DEFAULT", "VLLM_USE_FLASHINFER_SAMPLER", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            os.environ.pop(name, None)
        prepare_environment(settings)
        assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
        assert os.environ.get("TRITON_F32_DEFAULT") == ("ieee" if dtype == torch.float32 else None)
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        with pytest.raises(ValueError, match="rollout.free_cache_engine=True"):
            prepare_environment(settings)
