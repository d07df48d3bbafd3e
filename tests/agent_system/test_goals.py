"""Which goals are played: streams, splits and resumption."""

from __future__ import annotations

import numpy as np
import pytest

from agent_system.environments.env_package.webshop.envs import (
    CompatibleGoals,
    TrainingGoals,
    ValidationGoals,
    spread_order,
)


def draw(goals, groups, attempt=0, block=0):
    if attempt == 0:
        goals.new_rollout()
    return [goals.task(group, attempt, block) for group in range(groups)]


def test_training_plays_every_goal_once_before_any_again():
    goals = TrainingGoals(num_goals=560, num_groups=8, seed=3)
    first_round = [goal for _ in range(60 // 8) for goal in draw(goals, 8)]
    assert len(set(first_round)) == 56
    assert min(first_round) >= 500
    assert max(first_round) < 560
    following = draw(goals, 8)
    assert set(first_round) | set(following[:4]) == set(range(500, 560))


def test_the_stream_depends_on_the_seed_alone_and_resumes():
    one, same, other = (TrainingGoals(700, 4, seed) for seed in (1, 1, 2))
    assert draw(one, 4) == draw(same, 4)
    assert draw(other, 4) != draw(TrainingGoals(700, 4, 1), 4)
    state = one.state_dict()
    ahead = [draw(one, 4) for _ in range(3)]
    resumed = TrainingGoals(700, 4, 1)
    resumed.load_state_dict(state)
    assert [draw(resumed, 4) for _ in range(3)] == ahead
    with pytest.raises(ValueError, match="resume_mode"):
        TrainingGoals(800, 4, 1).load_state_dict(state)


@pytest.mark.parametrize("compatible", [False, True])
def test_a_replacement_does_not_depend_on_which_group_it_replaces(compatible):
    one, other = (
        CompatibleGoals(700, 3, 0, is_train=True) if compatible else TrainingGoals(700, 3, 0) for _ in range(2)
    )
    first = draw(one, 3)
    assert draw(other, 3) == first
    later = [one.task(group, attempt, 0) for attempt, group in enumerate((0, 0, 2, 1, 1), start=1)]
    assert [other.task(group, attempt, 0) for attempt, group in enumerate((2, 1, 0, 2, 1), start=1)] == later
    assert len(set(first + later)) == 8
    assert draw(one, 3) == draw(other, 3)


def test_no_goal_is_passed_over_where_fewer_groups_start():
    goals = TrainingGoals(num_goals=560, num_groups=8, seed=3)
    played = draw(goals, 5) + [goals.task(0, attempt, 0) for attempt in (1, 2)] + draw(goals, 8)
    same = TrainingGoals(num_goals=560, num_groups=15, seed=3)
    assert played == draw(same, 15)


def test_too_few_goals_is_the_users_mistake():
    with pytest.raises(ValueError, match=r"env\.webshop\.num_products"):
        TrainingGoals(num_goals=503, num_groups=4, seed=0)
    with pytest.raises(ValueError, match="val_batch_size"):
        draw(ValidationGoals(900, 128), 128, block=3), draw(ValidationGoals(900, 128), 128, block=4)


def test_validation_plays_the_same_tasks_each_once():
    goals = ValidationGoals(num_goals=900, num_groups=125)
    blocks = [draw(goals, 125, block=block) for block in range(4)]
    assert sorted(sum(blocks, [])) == list(range(500))
    assert draw(goals, 125, block=1) == blocks[1]
    assert draw(ValidationGoals(900, 250), 250) == blocks[0] + blocks[1]


@pytest.mark.parametrize("count", [1, 2, 10, 96, 500])
def test_every_beginning_of_the_spread_order_lies_evenly(count):
    order = spread_order(count)
    assert sorted(order) == list(range(count))
    for played in {min(count, 8), min(count, 128)} - {count}:
        gaps = np.diff(np.sort([*order[:played], order[0] + count]))
        assert gaps.max() <= 3 * count / played


def test_compatible_draws_are_those_of_the_reference():
    goals = CompatibleGoals(num_goals=900, num_groups=5, seed=1000, is_train=False)
    rng = np.random.RandomState(1000)
    for _ in range(3):
        assert draw(goals, 5) == [(1000 + g, goal) for g, goal in enumerate(rng.choice(range(500), 5, replace=False))]
    resumed = CompatibleGoals(900, 5, 1000, is_train=False)
    resumed.load_state_dict(goals.state_dict())
    assert draw(resumed, 5) == [(1000 + g, goal) for g, goal in enumerate(rng.choice(range(500), 5, replace=False))]
