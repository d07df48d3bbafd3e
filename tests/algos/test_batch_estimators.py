"""What must never matter to the estimators that whiten over the batch, have a baseline of their own, or rank a group.

The estimators that are relative to a group alone are tested for the same in ``test_estimators``. Whitening is over all
rows, so that other tasks do matter there; order, padding, masked positions and fillers do not.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from algos_support import Rows, objects, random_rows, rows_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from verl.trainer.ppo.advantage.scan import ValidFirst, suffix_sums
from verl.trainer.ppo.core_algos import (
    compute_gae_advantage_return,
    compute_grpo_passk_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
)

Estimator = Callable[[Rows], torch.Tensor]


def per_row(rows: Rows, width: int) -> torch.Tensor:
    """Numbers that belong to a row, whatever its place: a critic's values (rows, width), a baseline in column 0."""
    return torch.sin(rows.step_rewards.unsqueeze(-1) + rows.rewards[:, :5].sum(-1, keepdim=True) + torch.arange(width))


def passk(cross_steps: bool) -> Estimator:
    def estimate(rows: Rows) -> torch.Tensor:
        real = rows.mask.any(-1).numpy()
        assume(all(len(set(rows.traj_uid[real & (rows.uid == task)])) > 1 for task in set(rows.uid[real])))
        return compute_grpo_passk_outcome_advantage(
            rows.rewards, rows.mask, rows.uid, rows.traj_uid, step_index=rows.step_index,
            compute_mean_std_cross_steps=cross_steps,
        )[0]  # fmt: skip

    return estimate


def plus_plus_baseline(cross_steps: bool) -> Estimator:
    return lambda rows: compute_reinforce_plus_plus_baseline_outcome_advantage(
        rows.rewards, rows.mask, rows.uid, rows.traj_uid, step_index=rows.step_index,
        compute_mean_std_cross_steps=cross_steps,
    )[0]  # fmt: skip


ESTIMATORS: dict[str, Estimator] = {
    "gae": lambda rows: compute_gae_advantage_return(
        rows.rewards, per_row(rows, rows.mask.shape[1]), rows.mask, 0.97, 0.9
    )[0],
    "grpo_passk": passk(True),
    "grpo_passk per trajectory": passk(False),
    "reinforce_plus_plus": lambda rows: compute_reinforce_plus_plus_outcome_advantage(rows.rewards, rows.mask, 0.9)[0],
    "reinforce_plus_plus_baseline": plus_plus_baseline(True),
    "reinforce_plus_plus_baseline per trajectory": plus_plus_baseline(False),
    "remax": lambda rows: compute_remax_outcome_advantage(rows.rewards, rows.step_rewards, rows.mask)[0],
}
each_estimator = pytest.mark.parametrize("name", sorted(ESTIMATORS))
few = settings(deadline=None, max_examples=15)


def of_two_tokens(rows: Rows) -> Rows:
    """Whitening needs two tokens."""
    assume(int(rows.mask.sum()) >= 2)
    return rows


@each_estimator
@given(rows=random_rows(), data=st.data())
@few
def test_order_of_rows_does_not_matter(name: str, rows: Rows, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(of_two_tokens(rows)))))
    shuffled = ESTIMATORS[name](rows.select(order))
    torch.testing.assert_close(shuffled, ESTIMATORS[name](rows)[list(order)], rtol=1e-4, atol=1e-4)


@each_estimator
@given(rows=random_rows(), seed=st.integers(0, 99))
@few
def test_padding_and_masked_positions_do_not_matter(name: str, rows: Rows, seed: int) -> None:
    """The estimators' caller zeroes rewards where masked; values behind the end may be anything."""
    mask = torch.nn.functional.pad(of_two_tokens(rows).mask, (0, 3))
    rewards = torch.nn.functional.pad(rows.rewards, (0, 3))
    wider = Rows(rewards, mask, rows.uid, rows.traj_uid, rows.step_index, rows.anchors, rows.step_rewards)
    advantages = ESTIMATORS[name](wider)
    torch.testing.assert_close(advantages[:, :5], ESTIMATORS[name](rows), rtol=1e-4, atol=1e-5)
    assert not advantages[:, 5:].any()


@each_estimator
@given(rows=random_rows(), task=st.sampled_from(["task0", "filler"]))
@few
def test_filler_rows_do_not_matter(name: str, rows: Rows, task: str) -> None:
    filled = Rows(
        torch.cat([of_two_tokens(rows).rewards, torch.zeros(2, 5)]),
        torch.cat([rows.mask, torch.zeros(2, 5, dtype=torch.long)]),
        objects([*rows.uid, task, task]),
        objects([*rows.traj_uid, "task0-0", "filler"]),
        np.array([*rows.step_index, 90, 91]),
        objects([*rows.anchors, "a", "a"]),
        torch.cat([rows.step_rewards, torch.tensor([3.0, 4.0])]),
    )
    advantages = ESTIMATORS[name](filled)
    torch.testing.assert_close(advantages[: len(rows)], ESTIMATORS[name](rows), rtol=1e-4, atol=1e-5)
    assert not advantages[len(rows) :].any()


@pytest.mark.parametrize("name", ["grpo_passk", "grpo_passk per trajectory", "remax", *filter(
    lambda name: name.startswith("reinforce_plus_plus_baseline"), sorted(ESTIMATORS))])  # fmt: skip
@pytest.mark.parametrize("reward", [0.1, -3.25, 0.0])
def test_equal_rewards_give_nothing(name: str, reward: float) -> None:
    rows = rows_of([2] * 7, [reward] * 7, ["g"] * 7, list("aabbbcc"), ["s"] * 7, [reward] * 7)
    assert not ESTIMATORS[name](rows).any()


@given(seed=st.integers(0, 999), factor=st.sampled_from([0.0, 0.3, 0.9, 1.0]), width=st.integers(1, 40))
@few
def test_suffix_sums_against_the_loop(seed: int, factor: float, width: int) -> None:
    values = torch.randn(3, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected, running = torch.zeros_like(values), torch.zeros(3, dtype=torch.float64)
    for t in range(width - 1, -1, -1):
        running = values[:, t] + factor * running
        expected[:, t] = running
    torch.testing.assert_close(suffix_sums(values, factor), expected)


def test_valid_tokens_move_to_the_front_and_back() -> None:
    valid = torch.tensor([[0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    values = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])
    tokens = ValidFirst(valid)
    assert tokens.front(values).tolist() == [[2, 4, 0, 0], [5, 6, 0, 0], [0, 0, 0, 0]]
    assert tokens.back(tokens.front(values)).tolist() == [[0, 2, 0, 4], [5, 6, 0, 0], [0, 0, 0, 0]]


def test_tokens_of_a_response_with_holes_follow_each_other() -> None:
    """Tokens 0 and 2 are valid: the return of the first is 0 + 0.9 * 10."""
    rewards, mask = torch.tensor([[0.0, 0.0, 10.0]]), torch.tensor([[1, 0, 1]])
    _, returns = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, 0.9)
    assert returns.tolist() == [[9.0, 0.0, 10.0]]
