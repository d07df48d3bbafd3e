"""Parameters and optimiser state that live in host memory: right values, one host copy, no copy back after reading.

On CPU "device" and host are the same memory, but the copies are distinct tensors, as on a GPU.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.workers.ranks import run_ranks
from tests.workers.tiny import actor_config, embedded_config, random_rows, save_tiny_model, save_tiny_tokenizer
from verl.models.build import ModelSpec, build_model
from verl.models.lora import LoraSettings, adapters_off
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.checkpoint.hf_export import full_parameters
from verl.utils.fsdp_utils import ShardingOptions, create_device_mesh, ensure_process_group
from verl.workers import device_state, host_copies
from verl.workers.actor import DataParallelPPOActor
from verl.workers.device_state import OffloadedState
from verl.workers.fsdp_workers import ActorRolloutRefWorker
from verl.workers.host_copies import HostBuffers, OffloadedOptimizer, OffloadedParameters

CPU = torch.device("cpu")
ROWS = 12


class Network(nn.Module):
    """A tied head, fewer rows than ranks, a parameter that FSDP leaves alone, a buffer."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.few = nn.Linear(6, 1)
        self.plain = nn.Parameter(torch.randn(6, 6), requires_grad=False)
        self.head = nn.Linear(6, rows, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden @ self.plain) * self.scale
        return self.head(hidden) + self.few(hidden)


def network(shape: tuple[int, ...], rows: int, whole: bool, all_sharded: bool = False) -> nn.Module:
    torch.manual_seed(7)
    model = Network(rows)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp")[-len(shape) :])
    for layer in model.layers:
        if not whole:
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)  # stays gathered after a forward
    fully_shard(model, mesh=mesh, ignored_params=None if all_sharded else {model.plain})
    return model


def shards(model: nn.Module) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {n: p.to_local() if isinstance(p, DTensor) else p.data for n, p in model.named_parameters()}


def addresses(model: nn.Module, but: Collection[str] = ()) -> dict[str, int]:
    return {name: shard.data_ptr() for name, shard in shards(model).items() if name not in but}


def padded(model: nn.Module) -> set[str]:
    """Names of parameters whose rows are dealt unevenly: FSDP keeps their shards in padded memory of its own."""
    sharded = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    return {name for name, p in sharded.items() if p.shape[0] % p.device_mesh.size(-1)}


def check_one_host_copy(shape: tuple[int, ...], rows: int, whole: bool) -> None:
    model, tokens = network(shape, rows, whole), torch.arange(5)
    before = list(model.parameters())
    expected = model(tokens).detach().clone()
    offloaded = OffloadedParameters(model, CPU)
    values = {name: shard.clone() for name, shard in shards(model).items()}
    uneven = padded(model)
    at_home = addresses(model)
    for _ in range(2):
        offloaded.load()
        away = [weakref.ref(shard.untyped_storage()) for name, shard in shards(model).items() if name not in uneven]
        stayed = {address for name, address in at_home.items() if name not in uneven}  # padded memory is used again
        assert not set(addresses(model).values()) & stayed - {0}
        assert torch.equal(model(tokens), expected)
        with torch.no_grad():
            model(tokens)  # leaves the root gathered
        offloaded.store(changed=False)
        assert not any(storage() for storage in away), "the device copies are gone"
        assert addresses(model, uneven).items() <= at_home.items()
        assert all(torch.equal(shard, values[name]) for name, shard in shards(model).items())
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True)), "the optimiser knows them by identity"
    assert model.head.weight is model.embed.weight and model.scale == 0.5


def check_changes(shape: tuple[int, ...], rows: int, whole: bool) -> None:
    model, tokens = network(shape, rows, whole), torch.arange(5)
    offloaded = OffloadedParameters(model, CPU)
    uneven = padded(model)
    at_home = addresses(model, uneven)
    for changed in (True, False):
        offloaded.load()
        model(tokens).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 2
        new = {name: shard.clone() for name, shard in shards(model).items()}
        offloaded.store(changed)
        kept = shards(model)
        assert all(torch.equal(kept[name], new[name] if changed else new[name] / 2) for name in kept)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert addresses(model, uneven) == at_home


def check_shapes(shape: tuple[int, ...]) -> None:
    for rows in (12, 11):  # a multiple of all ranks, and one of none
        for whole in (True, False):
            check_one_host_copy(shape, rows, whole)
            check_changes(shape, rows, whole)


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_shards_come_and_go(shape: tuple[int, ...]) -> None:
    """Sharded over two ranks, and HSDP over four."""
    run_ranks(check_shapes, torch.Size(shape).numel(), shape)


def test_a_failed_load_leaves_the_model_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_process_group("cpu")
    model = network((1,), 12, False)
    offloaded = OffloadedParameters(model, CPU)
    at_home, copies = addresses(model), []

    def out_of_memory(host: torch.Tensor, device: torch.device) -> torch.Tensor:
        if len(copies) == 3:
            raise torch.OutOfMemoryError
        copies.append(host.clone())
        return copies[-1]

    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        patched.setattr(host_copies, "_device_copy", out_of_memory)
        offloaded.load()
    assert addresses(model) == at_home
    offloaded.load()
    offloaded.store(changed=True)
    assert addresses(model) == at_home


def test_another_device_is_that_of_the_parameters_until_they_are_stored() -> None:
    """The meta device holds no values: those after reading can only be the host's own."""
    ensure_process_group("cpu")
    model, tokens = network((1,), 12, False, all_sharded=True), torch.arange(5)
    expected = model(tokens).detach()
    offloaded = OffloadedParameters(model, CPU)
    with mock.patch.object(offloaded, "_device", torch.device("meta")):
        offloaded.load()
        assert all(parameter.is_meta and isinstance(parameter, nn.Parameter) for parameter in model.parameters())
        assert all(shard.is_meta for shard in shards(model).values())
        offloaded.store(changed=False)
    assert all(parameter.device == CPU for parameter in model.parameters())
    assert torch.equal(model(tokens), expected)


def test_what_fsdp_keeps_on_the_host_itself_stays_there() -> None:
    """``offload_policy``: the model computes on a GPU, its parameters and moments are on the host."""
    ensure_process_group("cpu")
    model = network((1,), 12, False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    at_home, moments = addresses(model), [value for state in optimizer.state.values() for value in state.values()]
    with mock.patch.object(host_copies, "synchronize"):
        parameters = OffloadedParameters(model, torch.device("cuda"))
        kept = OffloadedOptimizer(optimizer, torch.device("cuda"))
        for offloaded in (parameters, kept):
            offloaded.load()
        parameters.store(changed=True)
        kept.store()
    assert addresses(model) == at_home
    after = [value for state in optimizer.state.values() for value in state.values()]
    assert all(a is b for a, b in zip(moments, after, strict=True)) and len(after) > 6


def test_memory_that_cannot_be_page_locked_is_ordinary(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make, asked = torch.empty_like, []

    def refuse(tensor: torch.Tensor, device: str, pin_memory: bool = False) -> torch.Tensor:
        asked.append(pin_memory)
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nmore")
        return make(tensor, device=device)

    monkeypatch.setattr(torch, "empty_like", refuse)
    host_copies._warn_pageable.cache_clear()
    buffers = HostBuffers(torch.device("cuda"))
    with caplog.at_level(logging.WARNING, logger=host_copies.__name__):
        first, second = (buffers.fill(key, torch.arange(3.0) + key) for key in (1, 2))
    assert first.tolist() == [1, 2, 3] and second.tolist() == [2, 3, 4]
    assert asked == [True, False, False], "not asked for again"
    assert "CUDA error: out of memory)" in caplog.text and "param_offload" in caplog.text
    assert len(caplog.records) == 1
    assert buffers.fill(1, torch.zeros(3)) is first and buffers[1].tolist() == [0, 0, 0]
    assert buffers.fill(1, torch.zeros(4)).shape == (4,)


# -- a whole model, as the workers use it ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[mock.Mock]:
    """Offloading has an effect; yields the mock that stands for emptying the cache."""
    with mock.patch.object(device_state, "_has_own_memory", return_value=True):
        with mock.patch.object(device_state, "release_cached") as released:
            yield released


class Role:
    """An actor, offloaded or not."""

    def __init__(self, path: str, offload: bool, lora: LoraSettings | None = None) -> None:
        mesh = create_device_mesh(dist.get_world_size(), -1, "cpu")
        self.module = build_model(ModelSpec(path, lora=lora), mesh, ShardingOptions(reshard_after_forward=False))
        self.optimizer = torch.optim.AdamW([p for p in self.module.parameters() if p.requires_grad], lr=1e-2, eps=1e-2)
        self.state = OffloadedState(self.module, self.optimizer, CPU, offload, offload)
        self.actor = DataParallelPPOActor(actor_config(), self.module, self.optimizer)
        self.files = FSDPCheckpointManager(self.module, self.optimizer, lora=lora, base_path=path)

    def update(self, seed: int) -> None:
        rows = random_rows(ROWS, seed)[dist.get_rank() :: dist.get_world_size()]
        with self.state.loaded(with_optimizer=True):
            self.actor.update_policy(rows)

    def log_probs(self) -> torch.Tensor:
        with self.state.loaded():
            return self.actor.compute_log_prob(random_rows(ROWS))[0]

    def optimizer_addresses(self) -> list[int]:
        tensors = [v for s in self.optimizer.state.values() for k, v in s.items() if k != "step"]
        return [tensor.to_local().data_ptr() for tensor in tensors]


def check_training(path: str, folder: Path, lora: LoraSettings | None) -> None:
    """Offloaded training is plain training bit for bit, through a checkpoint; all host memory is used again."""
    with as_on_a_gpu():
        kept, moved = (Role(path, offload, lora) for offload in (False, True))
        uneven = padded(moved.module)
        at_home = addresses(moved.module, uneven)
        for role in (kept, moved):
            role.update(1)
        moments = moved.optimizer_addresses()
        assert torch.equal(kept.log_probs(), moved.log_probs())
        for role, name in ((kept, "kept"), (moved, "moved")):
            with role.state.loaded(with_optimizer=True):
                role.files.save_checkpoint(str(folder / name))
            role.update(2)
            with role.state.loaded(with_optimizer=True):
                role.files.load_checkpoint(str(folder / name))
            role.update(3)
        assert addresses(moved.module, uneven) == at_home and len(at_home) > 20
        assert moved.optimizer_addresses() == moments and len(moments) > 3
        if lora is not None:
            with adapters_off(moved.module), adapters_off(kept.module):
                assert torch.equal(kept.log_probs(), moved.log_probs())
        theirs = dict(full_parameters(kept.module))
        for name, tensor in full_parameters(moved.module):  # from the host, as weights reach an engine
            assert torch.equal(tensor, theirs[name]), name


def check_all_training(path: str, folder: str) -> None:
    check_training(path, Path(folder) / "full", None)
    check_training(path, Path(folder) / "lora", LoraSettings(rank=4, alpha=8))


def test_training_offloaded_is_training(model_path: str, tmp_path: Path) -> None:
    run_ranks(check_all_training, 2, model_path, str(tmp_path))


def test_the_cache_is_emptied_for_others_alone(model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_process_group("cpu")
    monkeypatch.delenv("WG_SHARES_DEVICE", raising=False)
    with as_on_a_gpu() as released:
        role = Role(model_path, offload=True)
        assert released.call_args_list == [mock.call(CPU)], "an engine measures next"
        role.log_probs()
        role.update(0)
        assert released.call_count == 1
        monkeypatch.setenv("WG_SHARES_DEVICE", "1")
        role.log_probs()
        role.update(0)
        assert released.call_count == 3
        Role(model_path, offload=False).log_probs()
        assert released.call_count == 3


def worker_steps(folder: Path, offload: bool) -> dict[str, torch.Tensor]:
    """Two steps of a worker with reference and engine, which is probed after each sync; what they computed."""
    key = "actor_rollout_ref"
    config = embedded_config(
        f"{key}.model.path={folder}",
        f"{key}.rollout.name=hf",
        f"{key}.actor.use_kl_loss=True",
        f"{key}.actor.optim.lr=0.01",
        f"{key}.actor.fsdp_config.param_offload={offload}",
        f"{key}.actor.fsdp_config.optimizer_offload={offload}",
        f"{key}.ref.fsdp_config.param_offload={offload}",
        "data.max_prompt_length=32",
        "data.max_response_length=9",
    )
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, "actor_rollout_ref", "cpu")
    worker.init_model(10)
    computed = {}
    for step in range(2):
        assert worker.begin_rollout()["perf/weight_sync/tensors"] > 20
        worker.end_rollout()
        rows = random_rows(ROWS, step)
        rows.batch["old_log_probs"] = worker.compute_log_prob(rows).batch["old_log_probs"]
        rows.batch["ref_log_prob"] = worker.compute_ref_log_prob(rows).batch["ref_log_prob"]
        metrics = worker.update_actor(rows).meta_info["metrics"]
        computed[f"norm {step}"] = torch.tensor(metrics["actor/grad_norm"])
        computed |= {f"{name} {step}": rows.batch[name] for name in ("old_log_probs", "ref_log_prob")}
    return computed | {name: tensor.clone() for name, tensor in full_parameters(worker.module)}


def test_a_worker_computes_the_same_offloaded(model_path: str) -> None:
    ensure_process_group("cpu")
    save_tiny_tokenizer(Path(model_path))
    expected = worker_steps(Path(model_path), offload=False)
    with as_on_a_gpu() as released:
        got = worker_steps(Path(model_path), offload=True)
    assert released.call_count == 2, "after actor and reference were built"
    assert got.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, got[name])] == []
    assert not torch.equal(got["old_log_probs 1"], got["ref_log_prob 1"]), "the reference stays"
