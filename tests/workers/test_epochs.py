"""``ppo_epochs`` and ``shuffle`` of policy and critic: how often and in which order the mini-batches come."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.workers.tiny import actor_config, embedded_config, random_rows, save_tiny_model
from verl.models.build import ModelSpec, build_model
from verl.protocol import DataProto
from verl.utils.checkpoint.hf_export import full_parameters
from verl.utils.fsdp_utils import ShardingOptions, create_device_mesh, ensure_process_group
from verl.workers.actor import DataParallelPPOActor
from verl.workers.critic import DataParallelPPOCritic

MINI_BATCHES = 4
both = pytest.mark.parametrize("role", ["actor", "critic"])


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    ensure_process_group("cpu")
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def rows_of_mini_batches() -> DataProto:
    rows = random_rows(8)
    rows.batch["mini_batch"] = torch.arange(8) % MINI_BATCHES
    return rows


def make(role: str, path: str, **changes: Any) -> Any:
    """An actor or critic with plain gradient descent, its module and its update."""
    mesh = create_device_mesh(dist.get_world_size(), -1, "cpu")
    kind = {"actor": "causal_lm", "critic": "value"}[role]
    module = build_model(ModelSpec(path, kind=kind, seed=7), mesh, ShardingOptions())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    if role == "actor":
        policy = DataParallelPPOActor(actor_config(**changes), module, optimizer)
        return policy, module, policy.update_policy
    critic = DataParallelPPOCritic(dataclasses.replace(embedded_config().critic, **changes), module, optimizer)
    return critic, module, critic.update_critic


@both
def test_two_epochs_are_two_updates_on_the_same_rows(role: str, model_path: str) -> None:
    _, at_once, update = make(role, model_path, ppo_epochs=2)
    update(rows_of_mini_batches())
    _, one_by_one, update = make(role, model_path, ppo_epochs=1)
    for _ in range(2):
        update(rows_of_mini_batches())
    expected = dict(full_parameters(one_by_one))
    for name, tensor in full_parameters(at_once):
        torch.testing.assert_close(tensor, expected[name], atol=0, rtol=0, msg=name)


@both
@pytest.mark.parametrize("shuffle", [False, True])
def test_shuffle_reorders_every_epoch_after_the_first(role: str, shuffle: bool, model_path: str) -> None:
    def orders() -> list[list[int]]:
        learner, _, update = make(role, model_path, ppo_epochs=3, shuffle=shuffle)
        taken: list[int] = []
        step = learner._step

        def remember(data: DataProto, rows: Any, members: Any, *rest: Any) -> None:
            taken.append(int(data.batch["mini_batch"][members[0]]))
            step(data, rows, members, *rest)

        learner._step = remember
        update(rows_of_mini_batches())
        return [taken[i : i + MINI_BATCHES] for i in range(0, 3 * MINI_BATCHES, MINI_BATCHES)]

    found, in_order = orders(), list(range(MINI_BATCHES))
    assert found[0] == in_order
    assert all(sorted(epoch) == in_order for epoch in found)
    assert (found[1] != in_order or found[2] != in_order) == shuffle
    assert orders() == found  # the same in every run, hence on every rank
