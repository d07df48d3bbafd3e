"""Several micro-batches before a step: weights gathered once and gradients reduced once give the same weights."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tests.workers.ranks import run_ranks
from tests.workers.tiny import actor_config, random_rows, save_tiny_model
from verl.models.build import ModelSpec, build_model
from verl.utils.checkpoint.hf_export import full_parameters
from verl.utils.fsdp_memory import gathered_bytes, gathered_root_bytes, unreduced_bytes
from verl.utils.fsdp_utils import (
    SMALL_MODEL,
    ShardingOptions,
    begin_micro_batch,
    count_parameters,
    create_device_mesh,
    decoder_layers,
    ensure_process_group,
    parameters_to_keep_gathered,
    reduce_gradients_once,
)
from verl.workers.actor import DataParallelPPOActor

ROWS, STEPS = 12, 2
PRECISIONS = {"float32": (None, None), "bfloat16": (torch.bfloat16, torch.float32)}
EVERY_TIME = "verl.workers.actor.dp_actor.begin_micro_batch"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    ensure_process_group("cpu")
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def _actor(
    path: str, precision: str, reshard_after_forward: bool, whole_below: int = 0, gathered_below: int = 0
) -> DataParallelPPOActor:
    mesh = create_device_mesh(dist.get_world_size(), -1, "cpu")
    options = ShardingOptions(
        *PRECISIONS[precision], reshard_after_forward, whole_below=whole_below, gathered_below=gathered_below
    )
    module = build_model(ModelSpec(path, seed=7), mesh, options)
    config = actor_config(use_dynamic_bsz=False, ppo_micro_batch_size_per_gpu=2, grad_clip=1.0)
    return DataParallelPPOActor(config, module, torch.optim.SGD(module.parameters(), lr=0.05), response_length=32)


def _weights(actor: DataParallelPPOActor) -> dict[str, torch.Tensor]:
    rows = random_rows(ROWS)[dist.get_rank() :: dist.get_world_size()]
    rows.batch["mini_batch"] = torch.arange(len(rows)) % STEPS
    actor.update_policy(rows)
    return {name: tensor.clone() for name, tensor in full_parameters(actor.actor_module)}


def _differing(path: str, precision: str, reshard_after_forward: bool) -> list[str]:
    """Names of weights that differ from those of an update which gathers and reduces in every micro-batch."""
    once = _weights(_actor(path, precision, reshard_after_forward))
    with mock.patch(EVERY_TIME):
        every_time = _weights(_actor(path, precision, reshard_after_forward))
    return [name for name, tensor in once.items() if not torch.equal(tensor, every_time[name])]


def _differing_whole(path: str, precision: str) -> list[str]:
    """Names of weights that differ between a model sharded as one unit and one sharded by layers."""
    layers = _weights(_actor(path, precision, True))
    whole = _weights(_actor(path, precision, True, SMALL_MODEL))
    return [name for name, tensor in layers.items() if not torch.equal(tensor, whole[name])]


def _differing_kept(path: str, precision: str) -> list[str]:
    """Names of weights that differ between a model small enough to stay gathered and one that is not.

    Several ranks add up gradients before they reduce them instead of after: the same numbers in another order.
    """
    freed, kept = (_weights(_actor(path, precision, True, 0, below)) for below in (0, SMALL_MODEL))
    near = {"atol": 0.0, "rtol": 0.0} if dist.get_world_size() == 1 else {"atol": 2e-7, "rtol": 1e-6}
    return [name for name, tensor in freed.items() if not torch.allclose(tensor, kept[name], **near)]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_unit_gets_the_same_weights_to_the_bit(model_path: str, precision: str) -> None:
    assert _differing_whole(model_path, precision) == []


def test_only_a_small_model_is_one_unit(model_path: str) -> None:
    count = count_parameters(_actor(model_path, "float32", True).actor_module)
    for whole_below, units in ((count, 3), (count + 1, 1)):  # two layers and the root, or the root
        module = _actor(model_path, "float32", True, whole_below).actor_module
        assert sum(isinstance(part, FSDPModule) for part in module.modules()) == units


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("reshard_after_forward", [False, True])
def test_one_rank_gets_the_same_weights_to_the_bit(
    model_path: str, precision: str, reshard_after_forward: bool
) -> None:
    assert _differing(model_path, precision, reshard_after_forward) == []


def test_two_ranks_get_the_same_weights_to_the_bit(model_path: str) -> None:
    assert run_ranks(_all_ways, 2, model_path, "bfloat16") == [([], [], [])] * 2


def test_two_ranks_gather_and_reduce_a_small_model_once_a_step(model_path: str) -> None:
    count = count_parameters(_actor(model_path, "bfloat16", True).actor_module)
    micro_batches = 2 * STEPS  # six rows a rank, three a step, two a micro-batch
    once = (STEPS, STEPS, 4 * count)  # full gradients in float32
    short_of_memory = (STEPS, micro_batches, 0)
    every_time = (2 * micro_batches, micro_batches, 0)  # gathered for forward and backward
    assert run_ranks(_calls_of_updates, 2, model_path) == [(once, short_of_memory, once, every_time)] * 2


def _calls_of_updates(path: str) -> tuple[tuple[int, int, int], ...]:
    """Of a small model, of the same one while it is short of memory and after that, and of one that is not small."""
    small, large = (_actor(path, "bfloat16", True, gathered_below=below) for below in (SMALL_MODEL, 0))
    calls = []
    for once in (True, False, True):
        reduce_gradients_once(small.actor_module, once)
        calls.append(_calls_of_an_update(small))
    return *calls, _calls_of_an_update(large)


def _calls_of_an_update(actor: DataParallelPPOActor) -> tuple[int, int, int]:
    calls = _count_calls(actor.actor_module, lambda: _weights(actor))
    return (*calls, unreduced_bytes(actor.actor_module))


@pytest.mark.parametrize("reduce_dtype, once", [(torch.float32, True), (torch.bfloat16, False), (None, False)])
def test_gradients_are_only_added_up_in_the_precision_of_the_parameters(
    model_path: str, reduce_dtype: torch.dtype | None, once: bool
) -> None:
    mesh = create_device_mesh(1, -1, "cpu")
    options = ShardingOptions(torch.bfloat16, reduce_dtype, gathered_below=SMALL_MODEL)
    assert build_model(ModelSpec(model_path, seed=7), mesh, options).sharding_options.reduce_once is once


def _all_ways(path: str, precision: str) -> tuple[list[str], list[str], list[str]]:
    return _differing(path, precision, False), _differing_whole(path, precision), _differing_kept(path, precision)


def _count_calls(module: nn.Module, call: Callable[[], object]) -> tuple[int, int]:
    """How often a layer's weights were gathered and its gradients reduced."""
    group = decoder_layers(module)[0]._get_fsdp_state()._fsdp_param_group
    gathered = 0
    original = type(group)._to_unsharded

    def counted(self: object) -> None:
        nonlocal gathered
        gathered += self is group
        original(self)

    with mock.patch.object(type(group), "_to_unsharded", counted), torch.profiler.profile() as profiler:
        call()
    name = "FSDP::post_backward_reduce (model.layers.0)"
    return gathered, sum(entry.count for entry in profiler.key_averages() if entry.key == name)


@pytest.mark.parametrize("options", [{}, {"whole_below": SMALL_MODEL}, {"gathered_below": SMALL_MODEL}])
def test_a_forward_leaves_the_weights_gathered_that_are_counted(model_path: str, options: dict[str, int]) -> None:
    model = _actor(model_path, "bfloat16", True, **options).actor_module
    groups = [part._get_fsdp_state()._fsdp_param_group for part in model.modules() if isinstance(part, FSDPModule)]

    def gathered() -> int:
        outputs = [output for group in groups for p in group.fsdp_params for output in p.all_gather_outputs]
        return sum(output.untyped_storage().size() for output in outputs)

    for first, last in ((True, False), (False, False), (False, True)):
        begin_micro_batch(model, last)
        before = gathered()
        loss = model(torch.arange(4)[None]).logits.sum()
        assert gathered() - before == gathered_root_bytes(model) + (gathered_bytes(model) if first else 0)
        loss.backward()
    assert gathered() == 0 and gathered_root_bytes(model) + gathered_bytes(model) > 0


@pytest.mark.parametrize("options", [{"reshard_after_forward": False}, {"gathered_below": SMALL_MODEL}])
def test_one_rank_gathers_and_reduces_once_a_step(model_path: str, options: dict[str, int]) -> None:
    actor = _actor(model_path, "bfloat16", **{"reshard_after_forward": True} | options)
    assert _count_calls(actor.actor_module, lambda: _weights(actor)) == (STEPS, STEPS)
    group = decoder_layers(actor.actor_module)[0]._get_fsdp_state()._fsdp_param_group
    assert not group.is_unsharded and group.reduce_grads and group.reshard_after_backward


def test_log_probabilities_of_a_small_model_gather_once(model_path: str) -> None:
    actor = _actor(model_path, "bfloat16", True, gathered_below=SMALL_MODEL)
    assert _count_calls(actor.actor_module, lambda: actor.compute_log_prob(random_rows(ROWS)))[0] == 1
    assert not decoder_layers(actor.actor_module)[0]._get_fsdp_state()._fsdp_param_group.is_unsharded


def test_only_a_model_that_is_small_for_its_device_stays_gathered(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = _actor(model_path, "bfloat16", True).actor_module
    count = count_parameters(module)
    for below, kept in ((count, 0), (count + 1, 2 * count)):
        module = _actor(model_path, "bfloat16", True, gathered_below=below).actor_module
        assert gathered_bytes(module) == kept
        assert unreduced_bytes(module) == 0  # what a single rank keeps in full are its shards
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 100 * 10**9))
    assert parameters_to_keep_gathered("cuda", torch.bfloat16) == 2 * 10**9
    assert parameters_to_keep_gathered("cuda", torch.float32) == 10**9
    assert parameters_to_keep_gathered("cpu", torch.bfloat16) == 0


def _host_reads(actor: DataParallelPPOActor, call: str, rows: int) -> int:
    """How often the host read a value that a device would have to compute first, over ``rows`` in one mini-batch."""
    data = random_rows(rows)
    data.batch["mini_batch"] = torch.zeros(rows, dtype=torch.int64)
    with torch.profiler.profile() as profiler:
        getattr(actor, call)(data)
    waits = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal")
    return sum(entry.count for entry in profiler.key_averages() if entry.key in waits)


@pytest.mark.parametrize("call", ["update_policy", "compute_log_prob"])
def test_no_micro_batch_makes_the_host_wait_for_the_device(model_path: str, call: str) -> None:
    actor = _actor(model_path, "bfloat16", True)
    assert _host_reads(actor, call, 4) == _host_reads(actor, call, 16)
