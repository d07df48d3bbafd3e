"""Advantage estimators: the reference's figures, definitions written plainly, and what must never matter."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from algos_support import Rows, first_token, fixture_f, objects, plain_episode_term, random_rows, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from gigpo.core_gigpo import compute_gigpo_outcome_advantage
from gigpo.hgpo import compute_hgpo_outcome_advantage
from verl.trainer.ppo.advantage.gae import gae_scan
from verl.trainer.ppo.core_algos import (
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
    compute_rloo_outcome_advantage,
)
from verl.utils.torch_functional import masked_whiten

ROWS = fixture_f()
ARGS = (ROWS.rewards, ROWS.mask, ROWS.uid, ROWS.traj_uid)


# --------------------------------------------------------------------------------------------- reference figures


def test_grpo_reference_figures() -> None:
    advantages, returns = compute_grpo_outcome_advantage(*ARGS)
    assert first_token(advantages) == pytest.approx([0.874642, 0.857322, -0.857322, -0.874642, 9.99999], abs=1e-6)
    assert torch.equal(advantages, returns)
    assert torch.equal(advantages != 0, ROWS.mask.bool())


def test_grpo_without_std_reference_figures() -> None:
    advantages, _ = compute_grpo_outcome_advantage(*ARGS, norm_adv_by_std_in_grpo=False)
    assert first_token(advantages) == pytest.approx([5.05, 4.95, -4.95, -5.05, 10.0], abs=1e-6)


def test_grpo_per_trajectory_reference_figures() -> None:
    advantages, _ = compute_grpo_outcome_advantage(*ARGS, compute_mean_std_cross_steps=False)
    assert first_token(advantages) == pytest.approx([0.707107, 0.692964, -0.707107, -0.721249, 9.99999], abs=1e-6)


def test_rloo_reference_figures() -> None:
    advantages, _ = compute_rloo_outcome_advantage(*ARGS)
    assert first_token(advantages) == pytest.approx([6.733333, 6.6, -6.6, -6.733333, 10.0], abs=1e-6)


def test_passk_reference_figures() -> None:
    four = ROWS.select(range(4))
    advantages, _ = compute_grpo_passk_outcome_advantage(four.rewards, four.mask, four.uid, four.traj_uid)
    assert first_token(advantages) == pytest.approx([0.0173197, 0.0, 0.0, 0.0], abs=1e-7)


def test_reinforce_plus_plus_baseline_reference_figures() -> None:
    advantages, _ = compute_reinforce_plus_plus_baseline_outcome_advantage(*ARGS)
    expected = [0.431674, 0.415844, -1.151333, -1.167163, 1.215262]
    assert first_token(advantages) == pytest.approx(expected, abs=1e-6)


def test_reinforce_plus_plus_reference_figures() -> None:
    advantages, returns = compute_reinforce_plus_plus_outcome_advantage(ROWS.rewards, ROWS.mask, gamma=0.9)
    assert returns[0].tolist() == pytest.approx([8.1, 9.0, 10.0, 0.0])
    assert advantages[0].tolist() == pytest.approx([0.533511, 0.726228, 0.940357, 0.0], abs=1e-6)


GAE_VALUES = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8], [0.1] * 4, [0.2] * 4, [0.0] * 4])


def test_gae_reference_figures() -> None:
    """The reference scans over padding as if it were text: with nothing masked in the scan its figures come out."""
    advantages, returns = gae_scan(ROWS.rewards, GAE_VALUES, torch.ones_like(ROWS.mask), gamma=0.99, lam=0.95)
    assert returns[0].tolist() == pytest.approx([8.886783, 9.438472, 10.0198, 0.0], abs=1e-5)
    whitened = masked_whiten(advantages, ROWS.mask)[0].tolist()
    assert whitened == pytest.approx([0.653549, 0.748081, 0.848815, -1.269105], abs=1e-6)


# --------------------------------------------------------------------------------------------- GAE


def test_gae_by_hand() -> None:
    """Rewards 0, 10; values .5, 1, and 99 behind the end. A_1 = 10 - 1; A_0 = (.9 * 1 - .5) + .9 * .8 * 9."""
    rewards = torch.tensor([[0.0, 10.0, 0.0]])
    values = torch.tensor([[0.5, 1.0, 99.0]])
    mask = torch.tensor([[1, 1, 0]])
    advantages, returns = gae_scan(rewards, values, mask, gamma=0.9, lam=0.8)
    assert advantages.tolist()[0] == pytest.approx([0.4 + 0.72 * 9.0, 9.0, 0.0])
    assert returns.tolist()[0] == pytest.approx([0.5 + 0.4 + 0.72 * 9.0, 10.0, 0.0])


@given(rows=random_rows(), seed=st.integers(0, 99), gamma=st.floats(0, 1), lam=st.floats(0, 1))
@settings(deadline=None, max_examples=40)
def test_gae_against_its_sum(rows: Rows, seed: int, gamma: float, lam: float) -> None:
    """A_t = sum over l of (gamma lam)^l delta_{t+l}, whatever the critic says behind the end."""
    values = torch.randn(rows.mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    advantages, returns = gae_scan(rows.rewards.double(), values, rows.mask, gamma, lam)
    for i, length in enumerate(rows.mask.sum(-1).tolist()):
        v = [*values[i, :length].tolist(), 0.0]
        delta = [float(rows.rewards[i, t]) + gamma * v[t + 1] - v[t] for t in range(length)]
        for t in range(length):
            expected = sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, length))
            assert float(advantages[i, t]) == pytest.approx(expected, abs=1e-9)
            assert float(returns[i, t]) == pytest.approx(expected + v[t], abs=1e-9)
        assert not advantages[i, length:].any() and not returns[i, length:].any()


def test_gae_with_lam_1_gives_returns_without_the_critic() -> None:
    """With gamma = lam = 1 the return of every token is the sum of the rewards from there on."""
    _, returns = compute_gae_advantage_return(ROWS.rewards, GAE_VALUES, ROWS.mask, 1.0, 1.0)
    expected = ROWS.rewards.flip(-1).cumsum(-1).flip(-1) * ROWS.mask
    torch.testing.assert_close(returns, expected)


def test_gae_advantages_are_white() -> None:
    advantages, _ = compute_gae_advantage_return(ROWS.rewards, GAE_VALUES, ROWS.mask, 0.99, 0.95)
    kept = advantages[ROWS.mask.bool()]
    assert float(kept.mean()) == pytest.approx(0.0, abs=1e-6) and float(kept.std()) == pytest.approx(1.0, abs=1e-5)


# --------------------------------------------------------------------------------------------- definitions


@given(rows=random_rows(), std=st.booleans(), cross=st.booleans())
@settings(deadline=None, max_examples=60)
def test_grpo_against_its_definition(rows: Rows, std: bool, cross: bool) -> None:
    advantages, _ = compute_grpo_outcome_advantage(
        rows.rewards,
        rows.mask,
        rows.uid,
        rows.traj_uid,
        norm_adv_by_std_in_grpo=std,
        compute_mean_std_cross_steps=cross,
        step_index=rows.step_index,
    )
    expected = plain_episode_term(rows, rows.scores, std, cross)
    assert first_token(advantages) == pytest.approx(expected, rel=1e-4, abs=1e-4)


@given(rows=random_rows())
@settings(deadline=None, max_examples=60)
def test_rloo_against_its_definition(rows: Rows) -> None:
    """Score less the mean of all other rows of the group."""
    advantages, _ = compute_rloo_outcome_advantage(rows.rewards, rows.mask, rows.uid, rows.traj_uid)
    for i, score in enumerate(rows.scores):
        others = [rows.scores[j] for j in range(len(rows)) if j != i and rows.uid[j] == rows.uid[i]]
        expected = score - (sum(others) / len(others) if others else 0.0)
        assert float(advantages[i, 0]) == pytest.approx(expected, abs=1e-4)


def test_rloo_per_trajectory_by_hand() -> None:
    """Task g: trajectory scores 10 and 0, mean 5, two of them: 2 (s - 5)."""
    advantages, _ = compute_rloo_outcome_advantage(*ARGS, compute_mean_std_cross_steps=False)
    assert first_token(advantages) == pytest.approx([10.0, 9.8, -10.0, -10.2, 10.0], abs=1e-5)


def test_passk_per_trajectory_rewards_every_step_of_the_best() -> None:
    """Trajectories 10 and 0: lead 10 over std 7.0711, for both steps of the first."""
    four = ROWS.select(range(4))
    advantages, _ = compute_grpo_passk_outcome_advantage(
        four.rewards, four.mask, four.uid, four.traj_uid, compute_mean_std_cross_steps=False
    )
    assert first_token(advantages) == pytest.approx([1.414213, 1.414213, 0.0, 0.0], abs=1e-5)


def test_passk_takes_the_earliest_of_equals_and_gives_it_nothing() -> None:
    rows = rows_of([1] * 3, [5.0, 5.0, 1.0], ["g"] * 3, list("abc"), ["s"] * 3, [0.0] * 3)
    advantages, _ = compute_grpo_passk_outcome_advantage(rows.rewards, rows.mask, rows.uid, rows.traj_uid)
    assert first_token(advantages) == [0.0, 0.0, 0.0]


def test_passk_needs_two_attempts() -> None:
    with pytest.raises(ValueError, match="group h has one: set env.rollout.n"):
        compute_grpo_passk_outcome_advantage(*ARGS)


@given(rows=random_rows(max_tasks=2))
@settings(deadline=None, max_examples=40)
def test_reinforce_plus_plus_returns_against_their_sum(rows: Rows) -> None:
    if int(rows.mask.sum()) < 2:
        return
    _, returns = compute_reinforce_plus_plus_outcome_advantage(rows.rewards, rows.mask, gamma=0.7)
    for i, length in enumerate(rows.mask.sum(-1).tolist()):
        expected = [sum(0.7 ** (k - t) * float(rows.rewards[i, k]) for k in range(t, length)) for t in range(length)]
        assert returns[i].tolist() == pytest.approx([*expected, *[0.0] * (5 - length)], abs=1e-5)


def test_remax_by_hand() -> None:
    rewards = torch.tensor([[1.0, 2.0, 3.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    advantages, returns = compute_remax_outcome_advantage(rewards, torch.tensor([4.0]), mask)
    assert returns.tolist() == [[6.0, 5.0, 3.0, 0.0]]
    assert advantages.tolist() == [[2.0, 1.0, -1.0, 0.0]]


# --------------------------------------------------------------------------------------------- what must never matter

Estimator = Callable[[Rows], torch.Tensor]


def gigpo(mode: str, **options: bool) -> Estimator:
    """GiGPO as a function of rows alone."""
    return lambda rows: compute_gigpo_outcome_advantage(
        rows.rewards,
        rows.step_rewards,
        rows.mask,
        rows.anchors,
        rows.uid,
        rows.traj_uid,
        mode=mode,
        step_index=rows.step_index,
        **options,
    )[0]


def hgpo(mode: str, as_published: bool) -> Estimator:
    """HGPO with an episode term, as a function of rows alone."""
    return lambda rows: compute_hgpo_outcome_advantage(
        rows.rewards,
        rows.step_rewards,
        rows.mask,
        rows.anchors,
        rows.uid,
        rows.traj_uid,
        history_length=2,
        mode=mode,
        episode_advantage_w=0.5,
        as_published=as_published,
        step_index=rows.step_index,
    )[0]


def grouped(fn: Callable, **options: bool) -> Estimator:
    """GRPO or RLOO as a function of rows alone."""
    return lambda rows: fn(rows.rewards, rows.mask, rows.uid, rows.traj_uid, step_index=rows.step_index, **options)[0]


GROUP_RELATIVE: dict[str, Estimator] = {
    "grpo": grouped(compute_grpo_outcome_advantage),
    "grpo per trajectory": grouped(compute_grpo_outcome_advantage, compute_mean_std_cross_steps=False),
    "dr.grpo": grouped(compute_grpo_outcome_advantage, norm_adv_by_std_in_grpo=False),
    "rloo": grouped(compute_rloo_outcome_advantage),
    "rloo per trajectory": grouped(compute_rloo_outcome_advantage, compute_mean_std_cross_steps=False),
    "gigpo mean_norm": gigpo("mean_norm"),
    "gigpo mean_std_norm": gigpo("mean_std_norm"),
    "gigpo per trajectory": gigpo("mean_norm", compute_mean_std_cross_steps=False),
    "gigpo similarity": gigpo("mean_norm", enable_similarity=True),
    "hgpo mean_norm": hgpo("mean_norm", as_published=False),
    "hgpo mean_std_norm": hgpo("mean_std_norm", as_published=False),
}
each_estimator = pytest.mark.parametrize("name", sorted(GROUP_RELATIVE))


@each_estimator
@given(rows=random_rows(), data=st.data())
@settings(deadline=None, max_examples=25)
def test_order_of_rows_does_not_matter(name: str, rows: Rows, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = GROUP_RELATIVE[name](rows.select(order))
    torch.testing.assert_close(shuffled, GROUP_RELATIVE[name](rows)[list(order)], rtol=1e-4, atol=1e-4)


@each_estimator
@given(rows=random_rows())
@settings(deadline=None, max_examples=25)
def test_other_groups_do_not_matter(name: str, rows: Rows) -> None:
    """Splitting the rows by task, as over ranks, gives each row what it gets among all."""
    together = GROUP_RELATIVE[name](rows)
    for task in set(rows.uid):
        mine = np.flatnonzero(rows.uid == task)
        torch.testing.assert_close(GROUP_RELATIVE[name](rows.select(mine)), together[mine])


@each_estimator
@given(rows=random_rows(), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=25)
def test_padding_and_masked_positions_do_not_matter(name: str, rows: Rows, seed: int) -> None:
    noise = torch.randn(len(rows), 8, generator=torch.Generator().manual_seed(seed)) * 100
    mask = torch.nn.functional.pad(rows.mask, (0, 3))
    rewards = torch.where(mask.bool(), torch.nn.functional.pad(rows.rewards, (0, 3)), noise)
    wider = Rows(rewards, mask, rows.uid, rows.traj_uid, rows.step_index, rows.anchors, rows.step_rewards)
    advantages = GROUP_RELATIVE[name](wider)
    torch.testing.assert_close(advantages[:, :5], GROUP_RELATIVE[name](rows))
    assert not advantages[:, 5:].any()


@each_estimator
@given(rows=random_rows(), task=st.sampled_from(["task0", "filler"]))
@settings(deadline=None, max_examples=25)
def test_filler_rows_do_not_matter(name: str, rows: Rows, task: str) -> None:
    """Rows with an empty mask change nobody's advantage, even under a real row's ids, and get none themselves."""
    filled = Rows(
        torch.cat([rows.rewards, torch.full((2, 5), 7.0)]),
        torch.cat([rows.mask, torch.zeros(2, 5, dtype=torch.long)]),
        objects([*rows.uid, task, task]),
        objects([*rows.traj_uid, "task0-0", "filler"]),
        np.array([*rows.step_index, 90, 91]),
        objects([*rows.anchors, "a", "a"]),
        torch.cat([rows.step_rewards, torch.tensor([3.0, 4.0])]),
    )
    advantages = GROUP_RELATIVE[name](filled)
    torch.testing.assert_close(advantages[: len(rows)], GROUP_RELATIVE[name](rows))
    assert not advantages[len(rows) :].any()


@each_estimator
@pytest.mark.parametrize("reward", [0.1, -3.3, 10.0, 0.0])
def test_equal_rewards_give_exactly_nothing(name: str, reward: float) -> None:
    rows = rows_of([2] * 7, [reward] * 7, ["g"] * 7, list("aabbbcc"), ["s"] * 7, [reward] * 7)
    assert not GROUP_RELATIVE[name](rows).any()
