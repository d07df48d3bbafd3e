"""Several roles in one process."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from controller_workers import Counter, Doubler

from verl.protocol import DataProto
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    WorkerError,
    base,
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


def start_named(role_arguments, **arguments):
    roles = {
        role: RayClassWithInitArgs("controller_workers.Counter", **given) for role, given in role_arguments.items()
    }
    env_vars = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}  # the ranks import the module
    pool = RayResourcePool([2], use_gpu=False)
    return RayWorkerGroup(pool, create_colocated_worker_cls(roles), env_vars=env_vars, **arguments)


def test_calls_wait_on_ranks_that_still_start_and_import_their_roles(ray_session):
    begin = time.time()
    group = start_named({"first": {"start": 3}, "second": {"start": 7}}, wait=False)
    warming = group.execute_all_async("warm_up")
    facades = group.spawn(["first", "second"])
    answers = facades["second"].execute_ranks_async([0, 1], "environment", "RANK")
    assert facades["first"].add_rank(rows()).batch["a"].tolist() == [3, 4]  # a registered method of a class by name
    assert group.master_address is None
    group.wait_until_started()
    assert group.master_address == facades["first"].master_address is not None
    assert facades["second"].get(answers) == ["0", "1"]
    for seconds in group.get(warming, method="warm_up"):
        assert 0 < seconds["startup/imports"] < seconds["startup/processes"] < time.time() - begin
    group.wait_until_started()  # once more does nothing
    group.shutdown()


def test_a_rank_that_fails_while_nobody_waits_is_reported_when_somebody_does(ray_session):
    group = start_named({"first": {"fail_on_rank": 1}}, wait=False)
    with pytest.raises(WorkerError, match="WorkerDict rank 1 failed in __init__: ValueError: data.train_batch_size=3"):
        group.wait_until_started()
    assert group._is_shut_down


def test_what_takes_too_long_is_reported_with_the_key_to_raise(ray_session, monkeypatch):
    group = start_named({"first": {}}, wait=False)
    refs = group.execute_all_async("_fuw_execute", "first_fwmn_trouble", 7, "raise_and_hang")
    with pytest.raises(TimeoutError, match=r"waited 0.1 s for trouble .* if they need longer, raise trainer.limit$"):
        group.get(refs, method="trouble", timeout=0.1, key="trainer.limit")
    group.shutdown(grace_seconds=0)

    monkeypatch.setattr(base, "_ANSWER_SECONDS", 0.1)  # an interpreter alone takes longer to start
    late = start_named({"first": {}}, wait=False, ray_wait_register_center_timeout=0.1)
    with pytest.raises(TimeoutError, match="for __init__ .* raise trainer.ray_wait_register_center_timeout"):
        late.wait_until_started()
    assert late._is_shut_down


def test_a_class_that_is_not_there_fails_the_start_of_its_ranks(ray_session):
    roles = {"first": RayClassWithInitArgs("no_such_module.Counter")}
    with pytest.raises(WorkerError, match="failed in __init__: ModuleNotFoundError: No module named 'no_such_module'"):
        RayWorkerGroup(RayResourcePool([1], use_gpu=False), create_colocated_worker_cls(roles))


def test_ranks_can_be_asked_for_before_torch_is_imported():
    heavy = "{'torch', 'tensordict', 'transformers', 'numpy'}"
    modules = "verl.trainer.main_ppo, verl.trainer.ppo.resources, verl.single_controller.ray"
    check = f"import sys, {modules}; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.strip() == "[]"
