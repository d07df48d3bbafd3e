"""The rollout loop over a real worker group: one replica of two ranks."""

from __future__ import annotations

import pytest
from support import make_config, policy, shopper, toy_manager
from test_rollout import assert_same_rows, roll_out
from worker_ranks import ScriptedRank

from verl.single_controller.ray import WorkerError
from verl.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture(scope="module")
def ranks(local_ray):
    import ray

    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(ScriptedRank)))
    yield group
    group.shutdown()


def test_all_ranks_of_a_replica_take_the_same_steps(ranks):
    config = make_config()
    rows = roll_out(config, ranks, toy_manager(config))
    assert rows.meta_info["rollout_metrics"]["timing_rollout_s/weight_sync"] == 1.0  # of the slowest rank
    assert_same_rows(rows, roll_out(config, policy(shopper), toy_manager(config)))
    calls = ranks.calls_seen()
    assert calls[0] == calls[1]
    assert len(calls[0]) == len(set(calls[0])) == len(rows)
    assert ranks.phases_seen() == [["begin", "end"]] * 2


def test_a_rank_that_fails_ends_the_run(ranks):
    ranks.break_rank(1)
    config = make_config()
    with pytest.raises(WorkerError, match="rank 1 failed in rollout_step.*: RuntimeError: rank 1 is out of memory"):
        roll_out(config, ranks, toy_manager(config))
