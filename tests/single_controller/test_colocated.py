"""Several roles in one process."""

import pytest
import torch
from controller_workers import Counter, Doubler

from verl.protocol import DataProto
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    WorkerError,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
)


def start(create, ranks):
    roles = {"counter": RayClassWithInitArgs(Counter, start=1), "counter_two": RayClassWithInitArgs(Doubler, start=5)}
    return RayWorkerGroup(RayResourcePool([ranks], use_gpu=False), create(roles), env_vars={"OMP_NUM_THREADS": "1"})


def rows():
    return DataProto.from_dict({"a": torch.zeros(2)})


@pytest.fixture(scope="module")
def group(ray_session):
    group = start(create_colocated_worker_cls, ranks=2)
    yield group
    group.shutdown()


def test_spawn_gives_each_role_its_own_methods(group):
    facades = group.spawn({"counter", "counter_two"})
    assert facades["counter"].add_rank(rows()).batch["a"].tolist() == [1, 2]
    assert facades["counter_two"].add_rank(rows()).batch["a"].tolist() == [5, 6]
    assert facades["counter_two"].double(rows()).batch["doubled"].tolist() == [0, 0]
    assert not hasattr(facades["counter"], "double") and not hasattr(facades["counter"], "two_double")
    assert group.counter_two_neighbour_value() == [1, 1]  # roles see each other
    with pytest.raises(ValueError, match="no role 'critic'"):
        group.spawn({"critic"})


def test_facades_reach_unregistered_methods_and_single_ranks(group):
    facade = group.spawn({"counter_two"})["counter_two"]
    assert facade.get(facade.execute_ranks_async([1, 0], "environment", "RANK")) == ["1", "0"]
    assert facade.execute_all_sync("neighbour_value") == [1, 1]
    assert facade.all_reduce() == [3.0, 3.0]
    assert (facade.master_address, facade.master_port) == (group.master_address, group.master_port)


def test_errors_carry_the_role(group):
    facade = group.spawn({"counter_two"})["counter_two"]
    with pytest.raises(WorkerError, match="counter_two rank 0 failed in trouble: KeyError"):
        facade.trouble(0, "raise")


def test_fused_groups(ray_session):
    group = start(create_colocated_worker_cls_fused, ranks=1)
    group.fuse(["counter", "counter_two"])
    assert group.counter.add_rank(rows()).batch["a"].tolist() == [1, 1]
    assert group.spawn_fused(["counter_two"])["counter_two"].add_rank(rows()).batch["a"].tolist() == [5, 5]
    assert group.execute_all_sync("_fuw_execute", "counter_two_fwmn_environment", "RANK") == ["0"]
    group.counter.shutdown()  # a facade is a part of the group
    assert group._is_shut_down
