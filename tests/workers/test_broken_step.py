"""A step that breaks off in a forward or a backward: its own error is what is seen, and no later step builds on it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.workers.tiny import actor_config, embedded_config, random_rows, save_tiny_model
from verl.models.build import ModelSpec, build_model
from verl.utils.fsdp_utils import ShardingOptions, create_device_mesh, decoder_layers, ensure_process_group
from verl.workers import device_state
from verl.workers.actor import DataParallelPPOActor
from verl.workers.critic import DataParallelPPOCritic
from verl.workers.device_state import OffloadedState

BREAKS = {"forward": nn.Module.register_forward_pre_hook, "backward": nn.Module.register_full_backward_hook}
breaks = pytest.mark.parametrize("where", BREAKS)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    ensure_process_group("cpu")
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def make(path: str, role: str = "actor") -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], Any]]:
    """A model, its optimiser and an update of one step with four micro-batches."""
    kind = {"actor": "causal_lm", "critic": "value"}[role]
    mesh = create_device_mesh(dist.get_world_size(), -1, "cpu")
    module = build_model(ModelSpec(path, kind=kind, seed=7), mesh, ShardingOptions())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    sizes = {"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 2}
    if role == "actor":
        actor = DataParallelPPOActor(actor_config(**sizes), module, optimizer)
        return module, optimizer, lambda: actor.update_policy(random_rows(8))
    config = dataclasses.replace(embedded_config().critic, **sizes)
    critic = DataParallelPPOCritic(config, module, optimizer)
    return module, optimizer, lambda: critic.update_critic(random_rows(8))


def out_of_memory_in(module: nn.Module, where: str) -> Any:
    """Break the second micro-batch in the middle of its last layer; returns the hook's handle."""
    calls = []

    def hook(*_: Any) -> None:
        calls.append(where)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory for this")

    return BREAKS[where](decoder_layers(module)[-1].mlp, hook)


@breaks
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_nothing_is_learnt_after_a_step_that_broke_off(model_path: str, role: str, where: str) -> None:
    module, _, update = make(model_path, role)
    update()
    with out_of_memory_in(module, where), pytest.raises(torch.OutOfMemoryError):
        update()
    before = {name: p.to_local().clone() for name, p in module.state_dict().items()}
    with pytest.raises(RuntimeError, match="start a new process"):
        update()
    assert all(torch.equal(p.to_local(), before[name]) for name, p in module.state_dict().items())


@breaks
def test_an_offloaded_model_does_not_hide_the_error(
    model_path: str, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    module, optimizer, update = make(model_path)
    with mock.patch.object(device_state, "_has_own_memory", return_value=True):
        state = OffloadedState(module, optimizer, torch.device("cpu"), True, True)
    with caplog.at_level(logging.WARNING, logger=device_state.__name__), out_of_memory_in(module, where):
        with pytest.raises(torch.OutOfMemoryError, match="no memory for this"), state.loaded(with_optimizer=True):
            update()
    assert ("could not be moved back" in caplog.text) == (where == "forward")
