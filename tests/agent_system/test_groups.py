"""Groups: which are played, kept and carried over, and the greedy episode beside each."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from support import ByteTokenizer, answer, make_config, policy, shell, shopper, toy_manager
from test_rollout import assert_same_rows, roll_out
from toy_shop import slow_for_some

from agent_system.multi_turn_rollout import TrajectoryCollector
from agent_system.multi_turn_rollout.episode import Episode, Turn
from agent_system.multi_turn_rollout.groups import GroupChoice
from agent_system.multi_turn_rollout.lock_step import LockStepAdapter

# ---------------------------------------------------------------------- the choice by itself


def group(number: int, *rewards: float) -> list[Episode]:
    return [
        Episode(0, number, member, 0, f"g{number}", f"g{number}m{member}", turns=[Turn(np.ones(1), "", reward=reward)])
        for member, reward in enumerate(rewards)
    ]


def play(outcomes: list[bool], wanted: int, at_once: int, most: int, seed: int) -> GroupChoice:
    """Groups end in a random order; ``outcomes[k]`` says whether group k is useful."""
    choice, order = GroupChoice(wanted, most, filtering=True), random.Random(seed)
    running = list(choice.start(at_once))
    while running:
        number = running.pop(order.randrange(len(running)))
        choice.close(number, group(number, 0.0, 10.0 if outcomes[number] else 0.0))
        if choice.needs_another:
            running += choice.start(1)
    return choice


@pytest.mark.parametrize("seed", range(5))
def test_the_batch_is_the_useful_groups_of_lowest_number_whatever_ends_first(seed):
    outcomes = [False, True, False, True, True, False, True, True, True, True]
    for order in range(10):
        choice = play(outcomes, wanted=4, at_once=4, most=10, seed=10 * seed + order)
        assert [members[0].group for members in choice.kept()] == [1, 3, 4, 6]
        assert choice.started == 7  # the fewest that hold four useful ones
        assert choice.surplus() == []
        assert choice.metrics() == {
            "rollout/groups_played": 7.0,
            "rollout/groups_dropped": 3.0,
            "rollout/groups_surplus": 0.0,
            "rollout/dead_group_share": 3 / 7,
        }


def test_more_groups_at_once_leave_a_surplus():
    outcomes = [True, False, True, True, True, False, True, True]
    for order in range(10):
        choice = play(outcomes, wanted=3, at_once=6, most=60, seed=order)
        assert [members[0].group for members in choice.kept()] == [0, 2, 3]
        assert [members[0].group for members in choice.surplus()] == [4]
        assert choice.started == 6


def test_the_last_dead_groups_complete_a_batch_when_the_tries_are_used_up():
    outcomes = [False, True, False, False, False, False]
    for order in range(10):
        choice = play(outcomes, wanted=3, at_once=3, most=6, seed=order)
        assert [members[0].group for members in choice.kept()] == [1, 4, 5]
        assert choice.metrics()["rollout/groups_dropped"] == 3.0


def test_without_filtering_every_group_is_kept_and_dead_ones_are_counted():
    choice = GroupChoice(2, 2, filtering=False)
    choice.start(2)
    choice.close(1, group(1, 0.0, 0.0))
    choice.close(0, group(0, 0.0, 1.0))
    assert not choice.needs_another
    assert [members[0].group for members in choice.kept()] == [0, 1]
    assert choice.metrics()["rollout/dead_group_share"] == 0.5
    assert choice.metrics()["rollout/groups_dropped"] == 0.0


def test_the_baseline_and_failed_episodes_do_not_make_a_group_useful():
    choice = GroupChoice(1, 2, filtering=True)
    choice.start(1)
    members = group(0, 0.0, 0.0, 10.0, 10.0)
    members[2].infra_failed, members[3].baseline = True, True
    choice.close(0, members)
    assert choice.needs_another


# ---------------------------------------------------------------------- in rollouts

pytestmark = pytest.mark.usefixtures("local_ray")


def filtered(size=2, **changes):
    return make_config(
        env__rollout__n=size,
        algorithm__filter_groups__enable=True,
        algorithm__filter_groups__max_num_gen_batches=4,
        **changes,
    )


def useful(rows) -> set[str]:
    columns = rows.non_tensor_batch
    return {
        uid for uid in columns["uid"] if len(set(columns["episode_rewards"][columns["uid"] == uid])) > 1
    }


def names(rows) -> list[str]:
    return list(dict.fromkeys(rows.non_tensor_batch["uid"]))


def test_groups_of_equal_rewards_are_replaced():
    plain, config = make_config(env__rollout__n=2), filtered()
    everything = roll_out(plain, policy(shopper), toy_manager(plain))
    rows = roll_out(config, policy(shopper), toy_manager(config))
    alive = useful(everything)
    assert 0 < len(alive) < 4
    assert everything.meta_info["rollout_metrics"]["rollout/dead_group_share"] == 1 - len(alive) / 4
    assert len(names(rows)) == 4
    assert useful(rows) == set(names(rows))
    assert alive < set(names(rows))
    metrics = rows.meta_info["rollout_metrics"]
    played = int(names(rows)[-1].removeprefix("step3-group")) + 1
    assert metrics["rollout/groups_played"] == played
    assert metrics["rollout/groups_dropped"] == played - 4
    assert metrics["rollout/dead_group_share"] == (played - 4) / played
    assert metrics["rollout/episodes"] == 2 * played
    slow = roll_out(config, policy(shopper, replicas=2, step_s=0.001), toy_manager(config, builder=slow_for_some))
    assert_same_rows(rows, slow)


def test_a_batch_is_filled_with_dead_groups_in_the_end():
    config = filtered()
    rows = roll_out(config, policy(lambda prompt, seed: answer("search[a]")), toy_manager(config))
    assert names(rows) == [f"step3-group{number}" for number in (12, 13, 14, 15)]
    assert rows.meta_info["rollout_metrics"]["rollout/dead_group_share"] == 1.0


def test_a_lock_step_manager_replaces_groups_too():
    config = filtered()
    manager = toy_manager(config)
    adapter = LockStepAdapter(manager, manager.num_episodes, manager.group_size)
    rows = roll_out(config, policy(shopper), adapter)
    assert len(names(rows)) == 4
    assert useful(rows) == set(names(rows))


def test_surplus_groups_are_cut():
    config = filtered(data__train_batch_size=2, data__gen_batch_size=6)
    rows = roll_out(config, policy(shopper), toy_manager(config), rows=6)
    assert len(names(rows)) == 2
    assert rows.meta_info["rollout_metrics"]["rollout/groups_surplus"] > 0
    hurried = roll_out(
        config, policy(shopper, replicas=2, step_s=0.001), toy_manager(config, builder=slow_for_some), rows=6
    )
    assert_same_rows(rows, hurried)


def test_surplus_groups_open_the_next_batch_and_survive_a_checkpoint(tmp_path):
    config = filtered(
        size=4, data__train_batch_size=4, data__gen_batch_size=7, algorithm__filter_groups__surplus="carry"
    )

    def two_steps(resume: bool):
        envs, client = toy_manager(config), policy(shopper)
        collector = TrajectoryCollector(config, ByteTokenizer())
        first = collector.multi_turn_loop(shell(7, global_steps=3), client, envs)
        if resume:
            torch.save({"collector": collector.state_dict(), "envs": envs.state_dict()}, tmp_path / "state.pt")
            state = torch.load(tmp_path / "state.pt", weights_only=False)
            envs, collector = toy_manager(config), TrajectoryCollector(config, ByteTokenizer())
            envs.load_state_dict(state["envs"])
            collector.load_state_dict(state["collector"])
        carried = [members[0].uid for members in collector.state_dict()["carried"]]
        return first, carried, collector.multi_turn_loop(shell(7, global_steps=4), client, envs)

    first, carried, second = two_steps(resume=False)
    assert len(names(first)) == len(names(second)) == 4
    assert 0 < len(carried) < 4
    assert names(second)[: len(carried)] == carried
    assert set(carried).isdisjoint(names(first))
    lag = second.non_tensor_batch["policy_lag"]
    assert (lag == [int(uid in carried) for uid in second.non_tensor_batch["uid"]]).all()
    assert not first.non_tensor_batch["policy_lag"].any()
    assert useful(second) == set(names(second))
    metrics = [rows.meta_info["rollout_metrics"] for rows in (first, second)]
    assert [one["rollout/groups_carried"] for one in metrics] == [0.0, len(carried)]
    assert metrics[0]["rollout/groups_surplus"] == len(carried)
    assert metrics[1]["rollout/groups_played"] >= 7 - len(carried)
    for one, other in zip((first, second), two_steps(resume=True)[::2], strict=True):
        assert_same_rows(one, other)


def test_carried_groups_are_dropped_where_a_resumed_run_does_not_carry(caplog):
    state = {"carried": [group(0, 0.0, 1.0), group(1, 0.0, 1.0)]}
    for config in (
        filtered(),
        make_config(algorithm__filter_groups__surplus="carry"),
        filtered(data__train_batch_size=2, algorithm__filter_groups__surplus="carry"),
    ):
        caplog.clear()
        collector = TrajectoryCollector(config, ByteTokenizer())
        collector.load_state_dict(state)
        assert collector.state_dict() == {"carried": []}
        assert "2 groups carried by the checkpoint are dropped" in caplog.text


def test_a_greedy_episode_of_every_task_is_played_beside_the_group():
    config = make_config(algorithm__adv_estimator="remax", env__rollout__n=2)
    plain = make_config(env__rollout__n=2)
    rows, without = (roll_out(one, policy(shopper), toy_manager(one)) for one in (config, plain))
    columns = rows.non_tensor_batch
    greedy = columns["is_baseline"]
    assert len(set(columns["traj_uid"][greedy])) == 4
    for uid in names(rows):
        mine = columns["uid"] == uid
        assert len(set(columns["task_id"][mine])) == 1
        assert set(columns["traj_uid"][mine & greedy]) == {f"{uid}-baseline"}
    assert rows.meta_info["rollout_metrics"]["rollout/episodes"] == 12
    assert rows.meta_info["temperature"] == 1.0
    sampled, width = rows.select_idxs(~greedy), without.batch["responses"].shape[1]
    for key in ("responses", "response_mask", "rollout_log_probs"):
        sampled.batch[key] = sampled.batch[key][:, :width].clone()  # the longest response may be a greedy one
    assert_same_rows(sampled, without)


def test_only_the_baseline_is_sampled_greedily():
    config = make_config(algorithm__adv_estimator="remax", env__rollout__n=1)
    client, seen = policy(shopper), {}
    submit = client.submit

    def remember(replica, requests, steps):
        seen.update((request.request_id, request.sampling.temperature) for request in requests)
        return submit(replica, requests, steps)

    client.submit = remember
    roll_out(config, client, toy_manager(config))
    assert {name: temperature == 0 for name, temperature in seen.items()} == {name: "baseline" in name for name in seen}


def test_an_environment_without_room_for_the_baselines_is_told():
    config, small = make_config(algorithm__adv_estimator="remax"), make_config()
    with pytest.raises(ValueError, match=r"env\.rollout\.n \+ 1, as ReMax plays a greedy episode"):
        roll_out(config, policy(shopper), toy_manager(small))
