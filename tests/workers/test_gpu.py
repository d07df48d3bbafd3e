"""What only a GPU shows: the variable-length kernel, bf16 compute, offloading, compiled layers. Run with ``-m gpu``."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2Config

from tests.workers.tiny import actor_config, random_rows, save_tiny_model
from verl.models import attention
from verl.models.activation_memory import activation_bytes_per_token
from verl.models.build import ModelSpec, build_model
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.checkpoint.hf_export import full_parameters
from verl.utils.fsdp_utils import ShardingOptions, create_device_mesh, ensure_process_group
from verl.workers.actor import DataParallelPPOActor
from verl.workers.device_state import OffloadedState, growing_segments
from verl.workers.memory_ledger import memory_ledger, memory_metrics
from verl.workers.rows import RaggedRows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

MIXED = ShardingOptions(torch.bfloat16, torch.float32)
DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    ensure_process_group("cuda")
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def _actor(path: str, options: ShardingOptions = MIXED, checkpointing: bool = False) -> DataParallelPPOActor:
    spec = ModelSpec(path, gradient_checkpointing=checkpointing)
    module = build_model(spec, create_device_mesh(1, -1, "cuda"), options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=not options.cpu_offload)
    return DataParallelPPOActor(actor_config(), module, optimizer, device=DEVICE)


def test_the_varlen_kernel_agrees_with_the_row_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [300, 1, 777, 64]
    q, k, v = (torch.randn(1, h, sum(lengths), 64, generator=generator).to(DEVICE, torch.bfloat16) for h in (12, 2, 2))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    cu = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    weight = torch.randn(1, sum(lengths), 12, 64, generator=generator).to(DEVICE, torch.bfloat16)
    for window in (None, 100):
        outputs, gradients = [], []
        for extra in ({"row_bound": cu.new_empty(1024, 0)}, {"row_lengths": tuple(lengths)}):
            out, _ = attention.packed_attention(
                torch.nn.Module(), q, k, v, None, scaling=0.125, sliding_window=window, cu_seq_lens_q=cu, **extra
            )
            outputs.append(out)
            gradients.append(torch.autograd.grad((out * weight).sum(), (q, k, v)))
        torch.testing.assert_close(*outputs, atol=2e-2, rtol=2e-2)
        for ours, theirs in zip(*gradients):
            assert (ours - theirs).float().norm() < 0.01 * theirs.float().norm()


def test_bf16_log_probs_are_near_those_of_float32(model_path: str) -> None:
    rows = random_rows(16)
    exact, _ = _actor(model_path, ShardingOptions()).compute_log_prob(rows)
    mixed, _ = _actor(model_path).compute_log_prob(rows)
    assert (exact - mixed).abs().mean() < 0.05


CHANGES = [{"compile_layers": True}, {"compile_layers": True, "gathered_below": 1 << 31}, {"cpu_offload": True}]


@pytest.mark.parametrize("change", CHANGES)
def test_compiling_keeping_and_offloading_change_no_result(model_path: str, change: dict[str, int]) -> None:
    plain, changed = _actor(model_path), _actor(model_path, dataclasses.replace(MIXED, **change), checkpointing=True)
    expected, got = (actor.update_policy(random_rows(16)) for actor in (plain, changed))
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, abs=0.02, rel=0.05), name
    theirs = dict(full_parameters(plain.actor_module))
    for name, tensor in full_parameters(changed.actor_module):
        torch.testing.assert_close(tensor.cpu(), theirs[name].cpu(), atol=3e-3, rtol=0)


def test_offloaded_state_frees_the_device_and_comes_back(model_path: str) -> None:
    kept, moved = _actor(model_path), _actor(model_path)
    state = OffloadedState(moved.actor_module, moved.actor_optimizer, DEVICE, params=True, optimizer_state=True)
    for _ in range(2):
        kept.update_policy(random_rows(16))
        assert not next(moved.actor_module.parameters()).is_cuda
        with state.loaded(with_optimizer=True):
            moved.update_policy(random_rows(16))
        with state.loaded():
            moved.compute_log_prob(random_rows(16))
    theirs = dict(full_parameters(kept.actor_module))
    with state.loaded():
        for name, tensor in full_parameters(moved.actor_module):
            torch.testing.assert_close(tensor, theirs[name], atol=1e-4, rtol=0)


def _shards(actor: DataParallelPPOActor) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {name: parameter.to_local() for name, parameter in actor.actor_module.named_parameters()}


def test_what_is_only_read_is_not_copied_back(model_path: str) -> None:
    reference = _actor(model_path)
    reference.actor_module.requires_grad_(False)
    expected, _ = reference.compute_log_prob(random_rows(16))
    state = OffloadedState(reference.actor_module, None, DEVICE, params=True)
    host = _shards(reference)
    values = {name: shard.clone() for name, shard in host.items()}
    assert all(shard.is_pinned() for shard in host.values())
    for spoilt in (False, True):
        with state.loaded():
            assert all(shard.is_cuda for shard in _shards(reference).values())
            if not spoilt:
                got, _ = reference.compute_log_prob(random_rows(16))
                assert torch.equal(got, expected)
            else:  # nothing of this reaches the host
                for shard in _shards(reference).values():
                    shard.zero_()
        for name, shard in _shards(reference).items():
            assert shard.data_ptr() == host[name].data_ptr() and torch.equal(shard, values[name])


def test_offloading_takes_no_new_memory_of_device_or_host(model_path: str) -> None:
    reference, actor = _actor(model_path), _actor(model_path)
    reference.actor_module.requires_grad_(False)
    states = (
        OffloadedState(reference.actor_module, None, DEVICE, params=True),
        OffloadedState(actor.actor_module, actor.actor_optimizer, DEVICE, params=True, optimizer_state=True),
    )

    def step() -> tuple[int, list[int]]:
        with states[0].loaded():
            reference.compute_log_prob(random_rows(16))
        with states[1].loaded(with_optimizer=True):
            actor.update_policy(random_rows(16))
        moments = [s["exp_avg"].to_local() for s in actor.actor_optimizer.state.values()]
        assert moments and all(moment.is_pinned() for moment in moments)
        host = [*_shards(reference).values(), *_shards(actor).values(), *moments]
        return torch.cuda.memory_stats(DEVICE)["num_device_alloc"], [tensor.data_ptr() for tensor in host]

    for _ in range(2):
        step()
    assert step() == step()


def test_a_shared_gpu_gets_the_cache_back(model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = _actor(model_path)
    state = OffloadedState(actor.actor_module, None, DEVICE, params=True)
    kept = {}
    for shares in ("0", "1"):
        monkeypatch.setenv("WG_SHARES_DEVICE", shares)
        with state.loaded():
            actor.compute_log_prob(random_rows(16))
            torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE)
        kept[shares] = torch.cuda.memory_reserved(DEVICE)
    assert kept["0"] - kept["1"] >= 64 << 20


def test_offloading_leaves_what_fsdp_offloads(model_path: str) -> None:
    plain, both = _actor(model_path), _actor(model_path, dataclasses.replace(MIXED, cpu_offload=True))
    state = OffloadedState(both.actor_module, both.actor_optimizer, DEVICE, params=True, optimizer_state=True)
    for _ in range(2):
        plain.update_policy(random_rows(16))
        with state.loaded(with_optimizer=True):
            both.update_policy(random_rows(16))
    theirs = dict(full_parameters(plain.actor_module))
    for name, tensor in full_parameters(both.actor_module):
        torch.testing.assert_close(tensor.cpu(), theirs[name].cpu(), atol=5e-3, rtol=0)


@pytest.mark.parametrize("compiled", [False, True])
def test_activations_are_measured_and_take_no_more_than_estimated(tmp_path: Path, compiled: bool) -> None:
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2}
    Qwen2Config(**shape, num_hidden_layers=6, vocab_size=128, tie_word_embeddings=True).save_pretrained(tmp_path)
    actor = _actor(str(tmp_path), dataclasses.replace(MIXED, compile_layers=compiled), checkpointing=True)
    rows = random_rows(256, longest=60)  # 9,710 tokens, in two micro-batches
    actor.config = dataclasses.replace(actor.config, ppo_mini_batch_size=len(rows))
    gc.collect()  # else models of earlier tests count as memory in use
    torch.cuda.reset_peak_memory_stats(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    assert actor.update_policy(rows)["perf/recomputed_layers/actor"] == 0
    measured, estimated = actor.memory.bytes_per_token, activation_bytes_per_token(actor.actor_module)
    assert measured is not None and 0.4 * estimated < measured < 1.05 * estimated
    ((tokens, _),) = actor.update_plan.sizes(RaggedRows(rows).lengths, [np.arange(len(rows))])
    assert torch.cuda.max_memory_allocated(DEVICE) - before > 6 * measured * tokens
    for count in (3, 6):  # the rest is measured as before where some layers are recomputed, and nothing where all are
        for index, layer in enumerate(actor.memory.adjustable):
            layer.gradient_checkpointing = index < count
        actor.memory.bytes_per_token, fits = None, actor.memory.fit
        actor.memory.fit = lambda sizes, count=count: count
        actor.update_policy(rows)
        actor.memory.fit = fits
        found = actor.memory.bytes_per_token
        assert found == (pytest.approx(measured, rel=0.15) if count == 3 else None)


def test_a_checkpoint_continues_on_the_gpu(model_path: str, tmp_path: Path) -> None:
    first, second = _actor(model_path), _actor(model_path)
    first.update_policy(random_rows(16))
    FSDPCheckpointManager(first.actor_module, first.actor_optimizer).save_checkpoint(str(tmp_path / "actor"))
    FSDPCheckpointManager(second.actor_module, second.actor_optimizer).load_checkpoint(str(tmp_path / "actor"))
    for actor in (first, second):
        actor.update_policy(random_rows(16, seed=1))
    theirs = dict(full_parameters(first.actor_module))
    for name, tensor in full_parameters(second.actor_module):
        torch.testing.assert_close(tensor, theirs[name], atol=1e-4, rtol=0)


def test_training_takes_memory_in_segments_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    torch.cuda.empty_cache()
    with growing_segments(DEVICE):
        addresses = {torch.empty(n << 20, dtype=torch.uint8, device=DEVICE).data_ptr() for n in (64, 96, 128)}
    assert len(addresses) == 1  # one segment that grew
    outside = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    segments = torch.cuda.memory_snapshot()
    for address, expandable in ((addresses.pop(), True), (outside.data_ptr(), False)):
        found = [s for s in segments if s["address"] <= address < s["address"] + s["total_size"]]
        assert [s["is_expandable"] for s in found] == [expandable]


def test_a_border_reads_the_peak_since_the_one_before_and_the_run_keeps_the_largest() -> None:
    memory_ledger(DEVICE, "start")
    torch.empty(2**30, dtype=torch.uint8, device=DEVICE)  # forgotten at once
    phase = memory_ledger(DEVICE, "phase")
    assert phase["perf/memory_gb/phase/peak"] - phase["perf/memory_gb/phase/allocated"] == pytest.approx(1, abs=0.01)
    idle = memory_ledger(DEVICE, "idle")
    assert idle["perf/memory_gb/idle/peak"] == idle["perf/memory_gb/idle/allocated"]
    assert memory_metrics(DEVICE)["perf/max_memory_allocated_gb"] >= phase["perf/memory_gb/phase/peak"]
