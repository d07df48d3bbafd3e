"""Two ranks on real Ray: dispatch, environment, errors, limits and the end."""

import time

import numpy as np
import psutil
import pytest
import ray
import torch
from controller_workers import AsyncWorker, Counter

from verl.protocol import DataProto, DataProtoFuture
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, WorkerError
from verl.single_controller.ray.base import WorkerTimeoutError, merge_resource_pool
from verl.single_controller.ray.processes import group_processes

TIMEOUT = 180


def start(cls=Counter, ranks=2, pool=None, env_vars=None, **init):
    return RayWorkerGroup(
        pool or RayResourcePool([ranks], use_gpu=False),
        RayClassWithInitArgs(cls, **init),
        ray_wait_register_center_timeout=TIMEOUT,
        env_vars={"OMP_NUM_THREADS": "1", **(env_vars or {})},
    )


@pytest.fixture(scope="module")
def group(ray_session):
    group = start(start=10, env_vars={"MY_SETTING": "yes"})
    yield group
    group.shutdown()


def rows(count, **kwargs):
    return DataProto.from_dict(
        {"a": torch.zeros(count)}, {"ids": [np.array([i, i], dtype=np.int32) for i in range(count)]}, **kwargs
    )


def test_rows_are_cut_and_joined_in_rank_order(group):
    data = rows(4)
    result = group.add_rank(data)
    assert result.batch["a"].tolist() == [10, 10, 11, 11]
    assert [value[0] for value in result.non_tensor_batch["ids"]] == [0, 1, 2, 3]
    assert result.meta_info["rank"] == 0  # the facts of rank 0
    assert data.batch["a"].tolist() == [0, 0, 0, 0]  # the driver's rows are its own
    with pytest.raises(AssertionError, match="5 rows do not divide into 2"):
        group.add_rank(rows(5))


@pytest.mark.parametrize("by_keyword", [False, True])
def test_padding_is_added_and_removed_for_positional_and_keyword_arguments(group, by_keyword):
    data, more = rows(5, auto_padding=True), DataProto.from_dict({"b": torch.arange(5.0)}, auto_padding=True)
    result = group.add_rank(data=data, more=more) if by_keyword else group.add_rank(data, more)
    assert result.batch["a"].tolist() == [10, 11, 12, 14, 15]
    assert len(data) == 5 and len(more) == 5
    assert len(group.add_rank(rows(1, auto_padding=True))) == 1
    assert group.rows_seen(data) == [3, 3]  # an answer per rank is not an answer per row


def test_futures_pass_through_the_next_call(group):
    future = group.add_rank_later(rows(4))
    assert isinstance(future, DataProtoFuture)
    assert group.add_rank(future).batch["a"].tolist() == [20, 20, 22, 22]
    assert future.get(timeout=60).batch["a"].tolist() == [10, 10, 11, 11]


def test_other_dispatch_modes(group):
    assert group.product([2, 3], y=[10, 20]) == [20, 60]
    with pytest.raises(AssertionError, match="list of 2 elements"):
        group.product([1, 2, 3], [1, 2, 3])
    assert group.own_or_same(["p", "q"]) == [(0, "p"), (1, "q")]  # one element for each rank
    assert group.own_or_same(["p", "q", "r"]) == [(0, ["p", "q", "r"]), (1, ["p", "q", "r"])]
    assert group.same(["p", "q"], y=7) == [(0, ["p", "q"], 7), (1, ["p", "q"], 7)]
    assert group.on_rank_zero(["p"]) == (0, ["p"])
    assert group.custom(5) == 5 + 6
    with pytest.raises(NotImplementedError):
        group.direct()


def test_functions_run_on_the_workers(group):
    def scale(worker, data):
        data.batch["a"] = data.batch["a"] + worker.rank * 100
        return data

    assert group.execute_with_func_generator(scale, rows(2)).batch["a"].tolist() == [0, 100]
    assert group.execute_func_rank_zero(lambda x: x + 1, 4) == 5


def test_calls_to_some_ranks(group):
    refs = group.execute_ranks_async([1], "environment", "RANK")
    assert group.get(refs, timeout=60) == ["1"]
    refs = group.execute_ranks_async([1, 0], "rows_seen", rows(3))
    assert group.get(refs) == [3, 3]
    assert group.execute_rank_zero_sync("environment", "RANK") == "0"


def test_environment_of_the_ranks(group):
    def values(key):
        return group.execute_all_sync("environment", key)

    assert values("RANK") == values("RAY_LOCAL_RANK") == values("LOCAL_RANK") == ["0", "1"]
    assert values("WORLD_SIZE") == values("RAY_LOCAL_WORLD_SIZE") == ["2", "2"]
    assert values("WG_BACKEND") == ["ray", "ray"] and values("WG_PREFIX") == [group.name_prefix] * 2
    assert values("MASTER_ADDR") == [group.master_address] * 2 and values("MASTER_PORT") == [group.master_port] * 2
    assert values("MY_SETTING") == ["yes", "yes"] and values("OMP_NUM_THREADS") == ["1", "1"]
    assert group.world_size == 2 and len(group.worker_names) == 2
    assert ray.get_actor(f"{group.name_prefix}_register_center") is not None
    with pytest.raises(ValueError, match="RANK"):
        RayWorkerGroup(RayResourcePool([1], use_gpu=False), RayClassWithInitArgs(Counter), env_vars={"RANK": "3"})


@pytest.mark.parametrize(("use_gpu", "groups", "shared"), [(True, 1, "0"), (True, 2, "1"), (False, 2, "0")])
def test_ranks_know_whether_others_may_be_on_their_gpu(group, use_gpu, groups, shared):
    pool = RayResourcePool([1], use_gpu=use_gpu, max_colocate_count=groups)
    assert group._rank_environment(0, 1, 0, 1, pool)["WG_SHARES_DEVICE"] == shared


def test_ranks_meet(group):
    assert group.all_reduce() == [3.0, 3.0]


def test_async_methods(ray_session):
    group = start(AsyncWorker, ranks=1)
    assert group.add_async(rows(2)).batch["a"].tolist() == [100, 100]
    group.shutdown()


def test_attach_to_running_workers_by_name(group):
    again = RayWorkerGroup.from_detached(
        worker_names=group.worker_names, ray_cls_with_init=RayClassWithInitArgs(Counter)
    )
    assert again.add_rank(rows(2)).batch["a"].tolist() == [10, 11]
    assert all(again._is_worker_alive(worker) for worker in again.workers)


def test_an_error_names_role_rank_and_method_once(group):
    with pytest.raises(WorkerError) as caught:
        group.trouble(1, "raise")
    error = caught.value
    assert (error.role, error.rank, error.method, error.cause_type) == ("Counter", 1, "trouble", "KeyError")
    assert isinstance(error.cause, KeyError) and "controller_workers.py" in error.remote_traceback
    assert not error.worker_died and error.__suppress_context__
    text = str(error)
    assert text.startswith("Counter rank 1 failed in trouble: KeyError: 'missing'") and "\x1b" not in text
    assert group.same(1) == [(0, 1, None), (1, 1, None)]  # the group goes on


def test_an_error_does_not_wait_for_ranks_that_hang_and_calls_have_limits(ray_session):
    group = start()
    began = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1"):
        group.trouble(1, "raise_and_hang")
    assert time.monotonic() - began < 120
    said = r"0.5 s for trouble on Counter ranks \[0, 1\], which did not answer; if they need longer, raise my.limit"
    with group.time_limit(0.5, key="my.limit"), pytest.raises(WorkerTimeoutError, match=said):
        group.trouble(7, "raise_and_hang")
    began = time.monotonic()
    group.shutdown(grace_seconds=0.5)  # rank 0 and 1 still hang
    assert time.monotonic() - began < 120


def test_a_dead_worker_is_named_and_shutdown_leaves_no_process(ray_session):
    pool = RayResourcePool([2], use_gpu=False)
    group = start(pool=pool)
    processes = [psutil.Process(pid) for pair in group.execute_all_sync("start_child") for pid in pair]
    assert len(processes) == 4 and all(group._is_worker_alive(worker) for worker in group.workers)
    with pytest.raises(WorkerError) as caught:
        group.trouble(1, "exit")
    assert caught.value.rank == 1 and caught.value.worker_died and caught.value.cause_type == "ActorDiedError"
    assert [group._is_worker_alive(worker) for worker in group.workers] == [True, False]

    name = group.worker_names[0]
    group.shutdown()
    group.shutdown()  # a second time does nothing
    # Also the child of rank 1, an orphan since its parent exited.
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
    with pytest.raises(ValueError):
        ray.get_actor(name)
    with pytest.raises(ValueError):
        ray.get_actor(f"{group.name_prefix}_register_center")
    assert pool.pgs is None


def test_a_failing_constructor_is_reported_with_its_text(ray_session):
    pool = RayResourcePool([2], use_gpu=False)
    with pytest.raises(WorkerError) as caught:
        RayWorkerGroup(pool, RayClassWithInitArgs(Counter, fail_on_rank=1), name_prefix="failing_start")
    error = caught.value
    assert (error.rank, error.method, error.cause_type) == (1, "__init__", "ValueError")
    assert error.cause_message == "data.train_batch_size=3 does not divide\nsecond line"
    assert pool.pgs is None and group_processes("failing_start") == []


def test_resources_that_cannot_be_had_are_refused(ray_session):
    with pytest.raises(ValueError, match="3 processes need 3 GPU but the Ray cluster has 2"):
        RayResourcePool([3], use_gpu=True, max_colocate_count=1).get_placement_groups()


def test_many_cpu_workers_fit_a_small_machine_and_pools_merge(ray_session):
    first, second = RayResourcePool([20], use_gpu=False), RayResourcePool([4], use_gpu=False)
    assert sum(group.bundle_count for group in first.get_placement_groups()) == 20
    merged = merge_resource_pool(first, second)
    assert merged.store == [20, 4] and merged.world_size == 24 and len(merged.get_placement_groups()) == 2
    assert merged.local_rank_list()[18:22] == [18, 19, 0, 1] and merged.local_world_size_list()[19:21] == [20, 4]
    merged.acquire()
    assert merged.release() is None and first.pgs is None and second.pgs is None


def test_every_rank_sees_its_own_accelerator_and_pools_give_them_back(ray_session):
    pool = RayResourcePool([2], use_gpu=True, max_colocate_count=1)
    assert pool.bundle() == {"CPU": 1.0, "GPU": 1.0}
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Counter))
    assert sorted(group.execute_all_sync("get_cuda_visible_devices")) == ["0", "1"]
    assert group.execute_all_sync("environment", "LOCAL_RANK") == ["0", "0"]  # it is device 0 of its process
    assert group.execute_all_sync("environment", "RAY_LOCAL_RANK") == ["0", "1"]

    late = RayResourcePool([1], use_gpu=True, max_colocate_count=1, start_timeout=1)
    with pytest.raises(TimeoutError, match="waited 1 s for"):
        late.get_placement_groups()
    group.shutdown()
    late.start_timeout = 60
    assert len(late.get_placement_groups()) == 1
    late.shutdown()


def test_two_groups_share_the_accelerators_of_a_pool(ray_session):
    pool = RayResourcePool([1], use_gpu=True, max_colocate_count=2)
    first = RayWorkerGroup(pool, RayClassWithInitArgs(Counter, start=1))
    second = RayWorkerGroup(pool, RayClassWithInitArgs(Counter, start=2))
    devices = [group.execute_rank_zero_sync("get_cuda_visible_devices") for group in (first, second)]
    assert devices[0] == devices[1] in ("0", "1")
    first.shutdown()
    assert pool.pgs is not None and second.same(1) == [(0, 1, None)]  # the pool stays while a group uses it
    second.shutdown()
    assert pool.pgs is None
