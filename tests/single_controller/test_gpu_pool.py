"""Pools with accelerators, on a cluster that claims to have two."""

import pytest
import ray
from controller_workers import Counter

from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup


@pytest.fixture(scope="module")
def cluster():
    ray.init(
        num_cpus=4, num_gpus=2, include_dashboard=False, address="local", logging_level="ERROR", log_to_driver=False
    )
    yield
    ray.shutdown()


def test_every_rank_sees_its_own_accelerator_and_pools_give_them_back(cluster):
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


def test_two_groups_share_the_accelerators_of_a_pool(cluster):
    pool = RayResourcePool([1], use_gpu=True, max_colocate_count=2)
    first = RayWorkerGroup(pool, RayClassWithInitArgs(Counter, start=1))
    second = RayWorkerGroup(pool, RayClassWithInitArgs(Counter, start=2))
    devices = [group.execute_rank_zero_sync("get_cuda_visible_devices") for group in (first, second)]
    assert devices[0] == devices[1] in ("0", "1")
    first.shutdown()
    assert pool.pgs is not None and second.same(1) == [(0, 1, None)]  # the pool stays while a group uses it
    second.shutdown()
    assert pool.pgs is None
