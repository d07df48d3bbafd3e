"""Memory and compilation of an update: what recomputation counts, segments that grow, figures that show what went wrong."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.models import recompute
from verl.models.compile_threads import share_compile_threads
from verl.models.recompute import LEAST_TOKENS, ActivationMemory, activation_bytes_per_token, optimizer_bytes_to_come
from verl.utils.fsdp_utils import ensure_process_group
from verl.workers import device_state
from verl.workers.device_state import growing_segments
from verl.workers.step_costs import StepCosts
from verl.workers.update_loop import MicroBatchPlan

ROWS = MicroBatchPlan(False, 1000, 2, "actor_rollout_ref.actor.ppo_")
TOKENS = dataclasses.replace(ROWS, use_dynamic_bsz=True)
LENGTHS = np.array([100, 300, 20, 30, 400, 10, 350])
MINIS = [np.array([0, 2, 4]), np.array([1, 3, 5, 6])]  # micro-batches of two rows: 120, 400; 330, 360


def test_room_is_left_for_adams_moments_until_they_exist() -> None:
    layer = torch.nn.Linear(10, 5)
    optimizer = torch.optim.AdamW(layer.parameters())
    cpu, elsewhere = torch.device("cpu"), torch.device("cuda", 0)
    assert optimizer_bytes_to_come(optimizer, cpu) == 2 * 4 * (10 * 5 + 5)
    assert optimizer_bytes_to_come(optimizer, elsewhere) == 0
    layer(torch.ones(2, 10)).sum().backward()
    optimizer.step()
    assert optimizer_bytes_to_come(optimizer, cpu) == 0


def test_the_largest_micro_batch_is_one_that_runs() -> None:
    assert ROWS.most_tokens(LENGTHS, MINIS) == 400
    assert TOKENS.most_tokens(LENGTHS, MINIS) == 690  # each mini-batch fits whole
    assert dataclasses.replace(TOKENS, max_tokens=350).most_tokens(LENGTHS, MINIS) == 400  # a row by itself
    assert ROWS.most_tokens(np.zeros(0, dtype=np.int64), []) == 1


def test_half_empty_micro_batches_are_worth_a_hint() -> None:
    hint = ROWS.hint(LENGTHS, MINIS)  # 1,210 tokens in 4
    assert hint is not None and "302 tokens on average" in hint
    assert "actor_rollout_ref.actor.use_dynamic_bsz=True" in hint
    assert "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1000" in hint
    assert dataclasses.replace(ROWS, max_tokens=600).hint(LENGTHS, MINIS) is None
    assert TOKENS.hint(LENGTHS, MINIS) is None


def test_a_plan_within_fewer_tokens_splits_into_more() -> None:
    assert TOKENS.within(400).most_tokens(LENGTHS, MINIS) == 400
    assert TOKENS.within(5000) == TOKENS
    assert ROWS.within(400).split(LENGTHS) == ROWS.split(LENGTHS)


LAYERS = 4
GIB = 1 << 30


@dataclasses.dataclass
class Gpu:
    """What a GPU would say about its memory."""

    free: float = 0.0
    allocated: int = 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(recompute, "free_bytes", lambda device: gpu.free)
    monkeypatch.setattr(recompute, "allocated_bytes", lambda device: gpu.allocated)
    return gpu


def _memory(checkpointing: bool = True) -> ActivationMemory:
    ensure_process_group("cpu")
    config = Qwen2Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return ActivationMemory(model)


def _free(memory: ActivationMemory, activations: float, share: float) -> float:
    """Free bytes of which so many are left for activations: 8 GiB and gradients stay free, and a share of the rest."""
    gradients = sum(p.nbytes for p in memory.model.parameters())
    return (activations + 8 * GIB) / share + gradients


def test_without_a_limit_of_memory_nothing_changes() -> None:
    memory = _memory()
    assert memory.tokens_that_fit(50_000) == 50_000
    assert memory.fit(50_000) == LAYERS
    with memory.measured(50_000, gathers=True):
        pass
    assert memory.bytes_per_token is None


def test_micro_batches_become_smaller_before_layers_are_recomputed(gpu: Gpu) -> None:
    memory = _memory()
    a_token = LAYERS * activation_bytes_per_token(memory.model)
    gpu.free = _free(memory, 10_000.5 * a_token, share=0.85)
    assert memory.tokens_that_fit(9_000) == 9_000
    assert memory.tokens_that_fit(16_384) == 10_000
    assert memory.fit(10_000) == 0
    assert memory.fit(20_000) == 2
    gpu.free = _free(memory, 4_096.5 * a_token, share=0.85)
    assert memory.tokens_that_fit(16_384) == LEAST_TOKENS == 8_192
    assert memory.tokens_that_fit(5_000) == 5_000
    assert memory.fit(8_192) == 2
    gpu.free = 0.0
    assert memory.tokens_that_fit(16_384) == LEAST_TOKENS
    assert memory.fit(8_192) == LAYERS


def test_layers_without_checkpointing_are_never_recomputed(gpu: Gpu) -> None:
    memory = _memory(checkpointing=False)
    assert memory.tokens_that_fit(16_384) == LEAST_TOKENS
    assert memory.fit(8_192) == 0


def test_what_a_forward_leaves_behind_takes_the_place_of_the_estimate(gpu: Gpu) -> None:
    memory = _memory()
    estimate = activation_bytes_per_token(memory.model)
    gpu.free = _free(memory, 10_000.5 * LAYERS * estimate, share=0.85)
    assert memory.fit(20_000) == 2
    gpu.free = _free(memory, 10_000.5 * LAYERS * estimate, share=0.95)
    for tokens, taken in ((9_000, 1.0), (20_000, 0.5), (10_000, 0.25)):  # the first has too few tokens to say much
        with memory.measured(tokens, gathers=False):
            inputs = 2 * tokens * 2 * 64  # two layers keep their bf16 inputs alone
            gpu.allocated += int(2 * tokens * taken * estimate) + inputs
    assert memory.bytes_per_token == pytest.approx(0.5 * estimate, rel=1e-6)
    assert memory.tokens_that_fit(40_000) == 20_001
    assert memory.fit(20_001) == 0
    assert memory.fit(25_000) == 1


def test_weights_that_a_forward_gathers_are_not_activations(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = _memory(checkpointing=False)
    monkeypatch.setattr(recompute, "gathered_bytes", lambda model: 1_000_000)
    for gathers, weights in ((True, 1_000_000), (False, 0)):
        with memory.measured(9_000, gathers=gathers):
            gpu.allocated += weights + 9_000 * LAYERS * 7
        assert memory.bytes_per_token == 7


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the allocator is told; nothing in the environment."""
    told: list[str] = []
    monkeypatch.setattr(device_state, "_set_allocator", told.append)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return told


def test_segments_grow_while_training_and_not_beyond(settings: list[str]) -> None:
    with pytest.raises(RuntimeError), growing_segments(torch.device("cuda")):
        assert settings == ["expandable_segments:True"]
        raise RuntimeError
    assert settings == ["expandable_segments:True", "expandable_segments:False"]


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_allocator_settings_of_the_environment_stay(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with growing_segments(torch.device("cpu")):
        assert settings == []
    monkeypatch.setenv(name, "expandable_segments:False")
    with growing_segments(torch.device("cuda")):
        assert settings == []


def test_costs_count_from_the_last_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_process_group("cpu")
    import torch._dynamo.utils as dynamo

    graphs = dynamo.counters["stats"]["unique_graphs"]
    monkeypatch.setitem(dynamo.counters["stats"], "unique_graphs", graphs)
    costs = StepCosts(torch.device("cpu"))
    dynamo.counters["stats"]["unique_graphs"] += 3
    assert costs.metrics() == {
        "perf/memory_alloc_retries": 0.0,
        "perf/memory_device_allocs": 0.0,
        "perf/compiled_graphs": 3.0,
        "perf/compile_s": 0.0,
    }
    assert costs.metrics()["perf/compiled_graphs"] == 0.0


@pytest.mark.parametrize(("variable", "expected"), [(None, 8), ("3", 3)])
def test_ranks_share_the_cores_for_building_kernels(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, expected: int
) -> None:
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    started: list[int | None] = []
    monkeypatch.setattr(AsyncCompile, "use_process_pool", lambda: started.append(config.compile_threads))
    monkeypatch.setattr(torch._utils, "cpu_count", lambda: 16)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", variable)
    with config.patch(compile_threads=1):  # as importing vLLM leaves it
        assert share_compile_threads(2) == config.compile_threads == expected
    assert started == [expected]
