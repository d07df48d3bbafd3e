"""Memory and compilation of an update: what recomputation counts, segments that grow, figures that show what went wrong."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.workers.ranks import run_ranks
from verl.models import activation_memory
from verl.models.activation_memory import ActivationMemory, activation_bytes_per_token, optimizer_bytes_to_come
from verl.models.compile_threads import share_compile_threads
from verl.utils.fsdp_utils import decoder_layers, ensure_process_group
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


def test_sizes_are_those_of_the_micro_batches_that_run() -> None:
    assert ROWS.sizes(LENGTHS, MINIS) == [[120, 400], [330, 360]]
    assert TOKENS.sizes(LENGTHS, MINIS) == [[520], [690]]  # each mini-batch fits whole
    assert dataclasses.replace(TOKENS, max_tokens=350).sizes(LENGTHS, MINIS) == [[120, 400], [340, 350]]  # 400 alone
    assert ROWS.sizes(np.zeros(0, dtype=np.int64), []) == []


def test_half_empty_micro_batches_are_worth_a_hint() -> None:
    hint = ROWS.hint(LENGTHS, MINIS)  # 1,210 tokens in 4
    assert hint is not None and "302 tokens on average" in hint
    assert "actor_rollout_ref.actor.use_dynamic_bsz=True" in hint
    assert "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1000" in hint
    assert dataclasses.replace(ROWS, max_tokens=600).hint(LENGTHS, MINIS) is None
    assert TOKENS.hint(LENGTHS, MINIS) is None


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
    monkeypatch.setattr(activation_memory, "free_bytes", lambda device: gpu.free)
    monkeypatch.setattr(activation_memory, "allocated_bytes", lambda device: gpu.allocated)
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


def _free(memory: ActivationMemory, tokens: float, recomputed: int, share: float) -> float:
    """Free bytes of which a micro-batch of so many tokens takes all that an update may take."""
    gradients = sum(p.nbytes for p in memory.model.parameters())
    return memory._memory().needed(tokens, recomputed) / share + gradients


def test_without_a_limit_of_memory_nothing_changes() -> None:
    memory = _memory()
    assert memory.cheapest_limit(50_000, lambda tokens: [[tokens]]) == 50_000
    assert memory.fit([[50_000]]) == LAYERS
    with memory.measured(50_000, gathers=True):
        pass
    assert memory.bytes_per_token is None


def test_as_many_layers_are_recomputed_as_the_free_memory_asks_for(gpu: Gpu) -> None:
    memory = _memory()
    gpu.free = _free(memory, 10_000, recomputed=0, share=0.85) + 1
    assert memory.fit([[9_000, 10_000], [3_000]]) == 0
    assert 1 <= memory.fit([[10_500]]) <= LAYERS
    gpu.free = _free(memory, 10_000, recomputed=2, share=0.85) + 1
    assert memory.fit([[10_000]]) == 2
    assert [layer.gradient_checkpointing for layer in decoder_layers(memory.model)] == [True, True, False, False]
    gpu.free = 0.0
    assert memory.fit([[10_000]]) == LAYERS


def test_micro_batches_become_smaller_where_that_costs_less(gpu: Gpu) -> None:
    memory = _memory()
    memory._launches = 100.0  # as if layers were large

    def split(tokens: int) -> list[list[int]]:
        return [[16_000]] if tokens >= 16_000 else [[8_000, 8_000]] if tokens >= 8_000 else [[4_000] * 4]

    gpu.free = _free(memory, 16_000, recomputed=0, share=0.85) + 1
    assert memory.cheapest_limit(20_000, split) == 20_000
    gpu.free = _free(memory, 8_000, recomputed=0, share=0.85) + 1
    assert 8_000 <= memory.cheapest_limit(20_000, split) < 16_000
    memory._launches = 1e6
    assert memory.cheapest_limit(20_000, split) == 20_000


def test_layers_without_checkpointing_are_never_recomputed(gpu: Gpu) -> None:
    memory = _memory(checkpointing=False)
    assert memory.fit([[8_192]]) == 0
    gpu.free = _free(memory, 4_000, recomputed=0, share=0.85) + 1
    assert memory.cheapest_limit(16_384, lambda tokens: [[tokens] * (16_384 // tokens)]) < 4_000


def test_what_a_forward_leaves_behind_takes_the_place_of_the_estimate(gpu: Gpu) -> None:
    memory = _memory()
    estimate = activation_bytes_per_token(memory.model)
    gpu.free = _free(memory, 20_000, recomputed=2, share=0.85) + 1
    assert memory.fit([[20_000]]) == 2
    for tokens, taken in ((9_000, 1.0), (20_000, 0.5), (10_000, 0.25)):  # the first has too few tokens to say much
        with memory.measured(tokens, gathers=False):
            inputs = 2 * tokens * 2 * 64  # two layers keep their bf16 inputs alone
            gpu.allocated += int(2 * tokens * taken * estimate) + inputs
    assert memory.bytes_per_token == pytest.approx(0.5 * estimate, rel=1e-6)
    gpu.free = _free(memory, 20_000, recomputed=0, share=0.95) + 1
    assert memory.fit([[20_000]]) == 0
    gpu.free = _free(memory, 20_000, recomputed=1, share=0.95) + 1
    assert memory.fit([[20_000]]) == 1


def test_only_what_is_trained_has_gradients(gpu: Gpu) -> None:
    memory = _memory()
    before = memory._free()
    memory.model.model.embed_tokens.weight.requires_grad_(False)
    assert memory._free() - before == pytest.approx(0.85 * 96 * 64 * 2)


def test_two_ranks_agree_though_their_memory_and_rows_differ() -> None:
    first, second = run_ranks(_fit_on_a_rank, 2)
    assert first == second and first[0] < 16_384 and first[1] > 0


def _fit_on_a_rank() -> tuple[int, int]:
    memory, rank = _memory(), dist.get_rank()
    memory._launches = 100.0
    room = (30_000, 5_000)[rank]
    activation_memory.free_bytes = lambda device: _free(memory, room, recomputed=0, share=0.85) + 1
    memory.adjustable = []  # so that only smaller micro-batches help
    lengths = np.random.default_rng(rank).integers(500, 900, 32)
    plan = MicroBatchPlan(True, 16_384, None, "actor_rollout_ref.actor.ppo_").fitted(memory, lengths, [np.arange(32)])
    memory.adjustable = list(decoder_layers(memory.model))
    return plan.max_tokens, memory.fit([[(4_000, 6_000)[rank]]])


def test_weights_that_a_forward_gathers_are_not_activations(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = _memory(checkpointing=False)
    monkeypatch.setattr(activation_memory, "gathered_bytes", lambda model: 1_000_000)
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
