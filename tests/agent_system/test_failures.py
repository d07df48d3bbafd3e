"""Environments that fail: what they cost, and whom."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import ray
from support import answer, make_config, policy, shopper, toy_manager
from test_rollout import assert_same_rows, roll_out
from toy_shop import deaf_sessions, misconfigured_sessions, once_broken_sessions, toy_sessions

from agent_system.environments.session_host import SessionPool, _Marker, count_hosts
from agent_system.multi_turn_rollout.episode import request_seed

pytestmark = pytest.mark.usefixtures("local_ray")


VICTIM = "step3-group0-member0"
SEED_OF_ITS_SECOND_TURN = request_seed(7, "train", 3, 0, 0, 0, 1)


def doing(action: str):
    """A shopper who does ``action`` in the second turn of one episode."""

    def script(prompt: str, seed: int) -> str:
        return answer(action) if seed == SEED_OF_ITS_SECOND_TURN else shopper(prompt, seed)

    return script


@pytest.fixture(scope="module")
def undisturbed(local_ray):
    config = make_config()
    return roll_out(config, policy(shopper), toy_manager(config))


def others(rows):
    return rows.select_idxs(rows.non_tensor_batch["traj_uid"] != VICTIM)


@pytest.mark.parametrize(("action", "reason"), [("crash", "on fire"), ("hang", "took longer"), ("die", "died")])
def test_a_failing_session_hurts_no_other(undisturbed, caplog, action, reason):
    config = make_config()
    pool = SessionPool(toy_sessions, num_hosts=2, step_limit_s=2.0 if action == "hang" else 60.0)
    rows = roll_out(config, policy(doing(action)), toy_manager(config, pool=pool))
    pool.close()
    assert_same_rows(others(undisturbed), rows)
    metrics = rows.meta_info["rollout_metrics"]
    assert metrics["rollout/infra_failed"] == 1
    assert metrics["rollout/infra_retried"] >= 1
    assert metrics["rollout/episodes"] == 12
    assert reason in caplog.text


def test_a_retry_gives_the_episode_it_would_have_been(undisturbed):
    config = make_config()
    rows = roll_out(config, policy(shopper), toy_manager(config, builder=once_broken_sessions))
    assert_same_rows(undisturbed, rows)
    assert rows.meta_info["rollout_metrics"]["rollout/infra_retried"] >= 4
    assert rows.meta_info["rollout_metrics"]["rollout/infra_failed"] == 0


def test_when_nothing_comes_through_the_reason_is_told():
    config = make_config()
    with pytest.raises(RuntimeError, match="none of the 12 episodes.*on fire"):
        roll_out(config, policy(lambda prompt, seed: answer("crash")), toy_manager(config))


def test_an_engine_that_fails_ends_the_run_with_its_error():
    def broken(prompt, seed):
        raise MemoryError("no room for the cache")

    config = make_config()
    with pytest.raises(MemoryError, match="no room for the cache"):
        roll_out(config, policy(broken), toy_manager(config))


def test_an_engine_that_hangs_ends_the_run(monkeypatch):
    monkeypatch.setattr("agent_system.multi_turn_rollout.episode_loop._POLL_S", 0.2)
    config = make_config(trainer__step_timeout=0.5)
    with pytest.raises(TimeoutError, match=r"trainer\.step_timeout=0\.5"):
        roll_out(config, policy(shopper, step_s=0.5), toy_manager(config))


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("readable", [True, False])
def test_a_host_that_does_not_answer_is_replaced(readable):
    pool = SessionPool(deaf_sessions, num_hosts=1)
    [marker] = [pool._folder / host.name for host in pool._hosts]
    if not readable:
        pool._folder = pool._folder / "elsewhere"  # as if the hosts were on another machine
    [ref] = pool.submit_resets([(0, 0), (1, 1), (2, 2)])
    assert [slot for slot, _ in pool.collect(ref)] == [0, 1, 2]
    [first] = pool.submit_steps([(0, "wait"), (2, "wait")])
    [second] = pool.submit_steps([(1, "wait")])
    wait_until(lambda: _Marker.read(marker) == "0")  # the host works on the first of them
    blameless = {slot: raw["blameless"] for slot, raw in pool.expire(first, "too late")}
    assert blameless == {0: False, 2: readable}  # what it worked on is known, or only the call
    [(slot, raw)] = pool.collect(second)
    assert (slot, raw["blameless"]) == (1, True)
    [ref] = pool.submit_steps([(1, "wait")])
    assert pool.collect(ref)[0][1]["blameless"]  # its session is gone with the host
    [ref] = pool.submit_resets([(0, 0), (1, 1)], fresh=True)
    assert [raw for _, raw in pool.collect(ref)] == [{"observation": 0}, {"observation": 1}]
    pool.close()
    pool.close()


def test_nobody_is_to_blame_for_a_process_that_is_killed_at_rest():
    pool = SessionPool(deaf_sessions, num_hosts=1)
    [pid] = pool.wait_until_built()
    os.kill(pid, signal.SIGKILL)
    [ref] = pool.submit_resets([(0, 0)])
    [(slot, raw)] = pool.collect(ref)
    assert (slot, raw["blameless"]) == (0, True)
    [ref] = pool.submit_resets([(0, 0)])
    assert pool.collect(ref) == [(0, {"observation": 0})]
    folder = pool._folder
    pool.close()
    assert not folder.exists()


def test_a_users_mistake_in_a_builder_reads_as_one():
    pool = SessionPool(misconfigured_sessions, num_hosts=2)
    with pytest.raises(ValueError, match=r"^env\.webshop\.data_dir=/nowhere"):
        pool.wait_until_built()
    pool.close()


class Unreadable:
    """A builder that no other process can read, like one whose module is not there."""

    def __reduce__(self):
        return __import__, ("no_such_module_of_the_user",)


def test_a_host_that_cannot_read_its_builder_says_why():
    pool = SessionPool(Unreadable(), num_hosts=2)
    with pytest.raises(RuntimeError, match="could not start: ModuleNotFoundError: No module named 'no_such_module_of"):
        pool.wait_until_built()
    pool.close()


def test_hosts_follow_the_cpus_that_episodes_count_for():
    cpus = int(ray.cluster_resources()["CPU"])
    assert count_hosts(4, 0.1) == 1
    assert count_hosts(10_000, 0.1) == cpus // 2
    assert count_hosts(10_000, 0.1, num_workers=7) == 7
    assert count_hosts(3, 0.1, num_workers=7) == 3
