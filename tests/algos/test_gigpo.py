"""GiGPO and HGPO: step returns, step groups, both terms."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from algos_support import Rows, first_token, fixture_f, objects, plain_episode_term, plain_step_term, random_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from gigpo.core_gigpo import (
    GigpoTerms,
    are_similar,
    build_step_group,
    compute_gigpo_outcome_advantage,
    compute_step_discounted_returns,
    episode_norm_reward,
    gigpo_metrics,
    step_norm_reward,
    summarize_group_size,
    to_hashable,
)
from gigpo.groups import factorize, first_of_each, group_statistics
from gigpo.hgpo import NO_GROUP, compute_hgpo_outcome_advantage, history_groups

ROWS = fixture_f()
ARGS = (ROWS.rewards, ROWS.step_rewards, ROWS.mask, ROWS.anchors, ROWS.uid, ROWS.traj_uid)


# --------------------------------------------------------------------------------------------- worked example


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("mean_norm", [9.8, 4.95, -9.7, -5.05, 10.0]),
        ("mean_std_norm", [1.581748, 0.857322, -1.564429, -0.874642, 9.99999]),
    ],
)
def test_worked_example(mode: str, expected: list[float]) -> None:
    advantages, returns = compute_gigpo_outcome_advantage(*ARGS, mode=mode)
    assert first_token(advantages) == pytest.approx(expected, abs=1e-6)
    assert torch.equal(advantages, returns) and advantages.dtype == torch.float32
    assert torch.equal(advantages != 0, ROWS.mask.bool())


def test_step_weight_scales_the_step_term_alone() -> None:
    episode = first_token(compute_gigpo_outcome_advantage(*ARGS, step_advantage_w=0.0)[0])
    assert episode == pytest.approx([5.05, 4.95, -4.95, -5.05, 10.0], abs=1e-6)
    doubled = first_token(compute_gigpo_outcome_advantage(*ARGS, step_advantage_w=2.0)[0])
    assert doubled == pytest.approx([5.05 + 9.5, 4.95, -4.95 - 9.5, -5.05, 10.0], abs=1e-6)


def test_the_terms_have_their_own_functions() -> None:
    groups = build_step_group(ROWS.anchors, ROWS.uid)
    episode = episode_norm_reward(ROWS.rewards, ROWS.mask, ROWS.uid, ROWS.traj_uid)
    step = step_norm_reward(ROWS.step_rewards, ROWS.mask, groups)
    assert first_token(step) == pytest.approx([4.75, 0.0, -4.75, 0.0, 0.0])
    torch.testing.assert_close(episode + step, compute_gigpo_outcome_advantage(*ARGS)[0])


def test_unknown_mode_names_the_key() -> None:
    with pytest.raises(ValueError, match="algorithm.gigpo.mode='std'"):
        compute_gigpo_outcome_advantage(*ARGS, mode="std")


@given(rows=random_rows(), std=st.booleans(), cross=st.booleans())
@settings(deadline=None, max_examples=60)
def test_gigpo_against_its_definition(rows: Rows, std: bool, cross: bool) -> None:
    advantages, _ = compute_gigpo_outcome_advantage(
        rows.rewards,
        rows.step_rewards,
        rows.mask,
        rows.anchors,
        rows.uid,
        rows.traj_uid,
        step_advantage_w=0.5,
        mode="mean_std_norm" if std else "mean_norm",
        compute_mean_std_cross_steps=cross,
        step_index=rows.step_index,
    )
    episode = plain_episode_term(rows, rows.scores, std, cross)
    step = plain_step_term(rows, list(zip(rows.uid, rows.anchors, strict=True)), std)
    expected = [e + 0.5 * s for e, s in zip(episode, step, strict=True)]
    assert first_token(advantages) == pytest.approx(expected, rel=1e-4, abs=1e-4)


# --------------------------------------------------------------------------------------------- step returns


def returns_of(rewards: list[float], traj_uid: list[str], gamma: float, **columns: np.ndarray) -> list[float]:
    """Step returns of rows given as lists."""
    arrays = {"rewards": np.array(rewards, dtype=np.float32), "traj_uid": objects(traj_uid), **columns}
    result = compute_step_discounted_returns(SimpleNamespace(non_tensor_batch=arrays), gamma)
    assert result.dtype == torch.float32 and result.shape == (len(rewards),)
    return result.tolist()


def test_step_returns_reference_figures() -> None:
    assert returns_of([0, 0, 10], ["t"] * 3, 0.95) == pytest.approx([9.025, 9.5, 10.0])


def test_step_returns_of_interleaved_trajectories() -> None:
    assert returns_of([1, 2, 3, 4], ["a", "b", "a", "b"], 0.5) == pytest.approx([2.5, 4.0, 3.0, 4.0])


def test_step_index_decides_the_order_in_time() -> None:
    assert returns_of([10, 0, 0], ["t"] * 3, 0.95, step_index=np.array([2, 0, 1])) == pytest.approx([10.0, 9.025, 9.5])


def test_object_columns_and_active_masks_are_understood() -> None:
    arrays = {"rewards": objects([0.0, 10.0]), "traj_uid": objects("tt"), "active_masks": objects([True, True])}
    assert compute_step_discounted_returns(SimpleNamespace(non_tensor_batch=arrays), 0.5).tolist() == [5.0, 10.0]
    arrays["active_masks"] = objects([True, False])
    with pytest.raises(AssertionError):
        compute_step_discounted_returns(SimpleNamespace(non_tensor_batch=arrays), 0.5)


def test_a_reward_that_is_not_a_number_names_its_trajectory() -> None:
    with pytest.raises(ValueError, match="nan in trajectory b"):
        returns_of([1, float("nan")], ["a", "b"], 0.95)


@given(rows=random_rows(), gamma=st.floats(0, 1))
@settings(deadline=None, max_examples=50)
def test_step_returns_against_their_sum(rows: Rows, gamma: float) -> None:
    rewards = rows.step_rewards.tolist()
    result = returns_of(rewards, list(rows.traj_uid), gamma)
    for i in range(len(rows)):
        later = [j for j in range(i, len(rows)) if rows.traj_uid[j] == rows.traj_uid[i]]
        assert result[i] == pytest.approx(sum(gamma**k * rewards[j] for k, j in enumerate(later)), abs=1e-4)


# --------------------------------------------------------------------------------------------- step groups


def partition(groups: np.ndarray) -> set[frozenset[int]]:
    """Groups as sets of rows, whatever they are called."""
    return {frozenset(np.flatnonzero(groups == group).tolist()) for group in set(groups.tolist())}


def test_equal_states_share_a_group_within_their_task_only() -> None:
    groups = build_step_group(ROWS.anchors, ROWS.uid)
    assert partition(groups) == {frozenset({0, 2}), frozenset({1}), frozenset({3}), frozenset({4})}


def test_images_are_grouped_by_their_bytes() -> None:
    image = np.zeros((30, 30, 3), dtype=np.uint8)
    other = image.copy()
    other[29, 29, 2] = 1
    anchors = objects([image, image.copy(), other, image[::-1]])
    assert partition(build_step_group(anchors, ["g"] * 4)) == {frozenset({0, 1, 3}), frozenset({2})}


def test_an_array_of_images_is_an_array_of_states() -> None:
    images = np.zeros((3, 4, 4), dtype=np.float32)
    images[1] = 1
    assert partition(build_step_group(images, ["g"] * 3)) == {frozenset({0, 2}), frozenset({1})}


def test_structured_states() -> None:
    first = {"text": "page", "numbers": [1, np.float32(2.0)], "map": np.arange(3)}
    second = {"map": np.arange(3), "numbers": (1, 2.0), "text": "page"}
    third = {**first, "text": "other"}
    assert partition(build_step_group(objects([first, second, third]), ["g"] * 3)) == {
        frozenset({0, 1}),
        frozenset({2}),
    }


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3),
        ("a", "a"),
        (True, True),
        (np.float64(1.5), 1.5),
        (np.array([[1, 2], [3, 4]]), (1, 2, 3, 4)),
        ([1, [2, "x"]], (1, (2, "x"))),
        ({"b": [1], "a": 2}, (("a", 2), ("b", (1,)))),
    ],
)
def test_to_hashable(value: object, expected: object) -> None:
    assert to_hashable(value) == expected
    hash(to_hashable(value))


@pytest.mark.parametrize("value", [None, b"bytes", object()])
def test_to_hashable_refuses(value: object) -> None:
    with pytest.raises(TypeError, match="cannot be compared"):
        to_hashable(value)


def test_similar_texts_share_a_group() -> None:
    """abcdefghij and abcdefghix have 9 of 10 letters in common: ratio 0.9."""
    anchors = objects(["abcdefghij", "abcdefghix", "zzz"])
    assert partition(build_step_group(anchors, ["g"] * 3, True, 0.9)) == {frozenset({0, 1}), frozenset({2})}
    assert len(partition(build_step_group(anchors, ["g"] * 3))) == 3
    assert len(partition(build_step_group(anchors, ["g", "h", "g"], True, 0.9))) == 3


@given(texts=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=12))
@settings(deadline=None, max_examples=60)
def test_similarity_is_greedy_first_match(texts: list[str]) -> None:
    """Each text joins the first group whose first member it resembles: the definition, without the shortcuts."""
    founders: list[str] = []
    expected = []
    for text in texts:
        match = next((k for k, founder in enumerate(founders) if are_similar(founder, text, 0.7)), None)
        if match is None:
            match = len(founders)
            founders.append(text)
        expected.append(match)
    assert build_step_group(objects(texts), ["g"] * len(texts), True, 0.7).tolist() == expected


@pytest.mark.parametrize("threshold", [0.0, 1.0, 1.5])
def test_similarity_threshold_lies_between_0_and_1(threshold: float) -> None:
    with pytest.raises(ValueError, match="algorithm.gigpo.similarity_thresh"):
        build_step_group(objects(["a"]), ["g"], True, threshold)


def test_similarity_is_for_texts() -> None:
    with pytest.raises(ValueError, match="enable_similarity"):
        build_step_group(objects([1, 2]), ["g", "g"], True, 0.9)
    with pytest.raises(ValueError, match="texts"):
        are_similar("a", 1)


# --------------------------------------------------------------------------------------------- statistics and metrics


def test_group_statistics_by_hand() -> None:
    statistics = group_statistics(np.array([10.0, 0.0, 7.0]), np.array([0, 0, 1]))
    assert statistics.size.tolist() == [2, 2, 1]
    assert statistics.mean.tolist() == [5.0, 5.0, 7.0]
    assert statistics.deviation.tolist() == [5.0, -5.0, 0.0]
    assert statistics.std.tolist() == pytest.approx([50**0.5, 50**0.5, 0.0])
    assert group_statistics(np.array([10.0, 0.0]), np.array([0, 0]), unbiased=False).std.tolist() == [5.0, 5.0]


def test_first_of_each() -> None:
    codes = factorize("abab")
    assert first_of_each(codes).tolist() == [True, True, False, False]
    assert first_of_each(codes, np.array([5, 1, 2, 3])).tolist() == [False, True, True, False]


def test_metrics_by_hand() -> None:
    """Step groups {0, 2}, {1}, {3} and {4}; the last row is a filler."""
    terms = GigpoTerms(
        episode=np.array([3.0, -3.0, 3.0, -3.0, 99.0]),
        step=np.array([2.0, 0.0, -2.0, 0.0, 99.0]),
        step_groups=np.array([0, 1, 0, 2, 0]),
        members=np.array([True, True, True, True, False]),
    )
    assert gigpo_metrics(terms) == pytest.approx(
        {
            "gigpo/anchor_group_size/mean": 4 / 3,
            "gigpo/anchor_group_size/max": 2.0,
            "gigpo/singleton_share": 0.5,
            "gigpo/zero_step_advantage_share": 0.5,
            "gigpo/episode_advantage_rms": 3.0,
            "gigpo/step_advantage_rms": 2**0.5,
            "gigpo/terms_correlation": 0.0,  # (3 * 2 + 3 * -2) / 4
            "gigpo/step_only_share": 0.0,
        }
    )


def test_metrics_of_two_terms_that_agree_and_of_a_group_with_a_step_term_alone() -> None:
    groups = np.array([0, 0, 1, 1])
    solved = GigpoTerms(
        episode=np.array([4.0, -4.0, 0.1, -0.1]), step=np.array([2.0, -2.0, 1.0, -1.0]), step_groups=groups,
        members=np.ones(4, dtype=bool),
    )  # fmt: skip
    metrics = gigpo_metrics(solved)
    assert metrics["gigpo/step_only_share"] == pytest.approx(2 / 10)  # squares 1 + 1 of 4 + 4 + 1 + 1
    # by hand: the products add up to 16.2, the squares to 32.02 and 10
    assert metrics["gigpo/terms_correlation"] == pytest.approx(16.2 / (32.02 * 10) ** 0.5)
    metrics = gigpo_metrics(dataclasses.replace(solved, step=np.zeros(4)))
    assert metrics["gigpo/terms_correlation"] == metrics["gigpo/step_only_share"] == 0.0


def test_group_sizes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="gigpo"):
        build_step_group(ROWS.anchors, ROWS.uid, summarize=True)
        summarize_group_size([])
    assert "4, mean size 1.25 (3 of size 1, 1 of size 2)" in caplog.text


# --------------------------------------------------------------------------------------------- HGPO


def test_history_groups_by_hand() -> None:
    """Two trajectories a b c and b b c: at depth 1 the two c after b meet, at depth 2 they part."""
    anchors, traj = objects("abcbbc"), objects("xxxyyy")
    depth0, depth1, depth2 = history_groups(anchors, ["g"] * 6, traj, 2)
    assert partition(depth0) == {frozenset({0}), frozenset({1, 3, 4}), frozenset({2, 5})}
    assert depth1[[0, 3]].tolist() == [NO_GROUP] * 2
    assert depth1[2] == depth1[5] and depth1[1] != depth1[4]
    assert depth2[[0, 1, 3, 4]].tolist() == [NO_GROUP] * 4 and depth2[2] != depth2[5]


@given(rows=random_rows(max_steps=5))
@settings(deadline=None, max_examples=40)
def test_history_groups_are_nested(rows: Rows) -> None:
    depths = history_groups(rows.anchors, rows.uid, rows.traj_uid, 3, step_index=rows.step_index)
    for wide, narrow in zip(depths[:-1], depths[1:], strict=True):
        for group in set(narrow.tolist()) - {NO_GROUP}:
            assert len(set(wide[narrow == group].tolist())) == 1


def plain_hgpo(rows: Rows, depth: int, alpha: float, std: bool) -> list[float]:
    """The definition: weighted mean of the relative returns over every depth with company."""
    history = []
    for i in range(len(rows)):
        mine = [j for j in range(i + 1) if rows.traj_uid[j] == rows.traj_uid[i]]
        history.append([rows.anchors[j] for j in reversed(mine)])
    result = [0.0] * len(rows)
    weights = [0.0] * len(rows)
    for k in range(depth + 1):
        keys = [(rows.uid[i], *history[i][: k + 1]) if len(history[i]) > k else None for i in range(len(rows))]
        term = plain_step_term(rows, keys, std)
        for i in range(len(rows)):
            if keys[i] is not None and keys.count(keys[i]) > 1:
                result[i] += (k + 1) ** alpha * term[i]
                weights[i] += (k + 1) ** alpha
    return [r / w if w else 0.0 for r, w in zip(result, weights, strict=True)]


@given(rows=random_rows(), depth=st.integers(0, 3), alpha=st.sampled_from([0.0, 1.0, 2.0]), std=st.booleans())
@settings(deadline=None, max_examples=60)
def test_hgpo_against_its_definition(rows: Rows, depth: int, alpha: float, std: bool) -> None:
    advantages, _ = compute_hgpo_outcome_advantage(
        rows.rewards,
        rows.step_rewards,
        rows.mask,
        rows.anchors,
        rows.uid,
        rows.traj_uid,
        history_length=depth,
        weight_alpha=alpha,
        mode="mean_std_norm" if std else "mean_norm",
    )
    assert first_token(advantages) == pytest.approx(plain_hgpo(rows, depth, alpha, std), rel=1e-4, abs=1e-4)


def test_hgpo_with_no_history_is_gigpos_step_term() -> None:
    advantages, _ = compute_hgpo_outcome_advantage(*ARGS, history_length=0)
    torch.testing.assert_close(
        advantages, step_norm_reward(ROWS.step_rewards, ROWS.mask, build_step_group(ROWS.anchors, ROWS.uid))
    )


def test_hgpo_as_published_by_hand() -> None:
    """Two trajectories s1 s2, returns 1 3 and 1 7. Depth 0 of s1: both 1, so its term is 0.

    s2 has company at both depths, deviation -2 and 2, biased std 2: -1 and 1. By the definition (unbiased std 2 sqrt 2)
    it is 1 / sqrt 2.
    """
    mask = torch.ones(4, 1, dtype=torch.long)
    args = (
        torch.zeros(4, 1),
        torch.tensor([1.0, 3.0, 1.0, 7.0]),
        mask,
        objects("abab"),
        objects("gggg"),
        objects("xxyy"),
    )
    published, _ = compute_hgpo_outcome_advantage(*args, history_length=1, mode="mean_std_norm", as_published=True)
    assert first_token(published) == pytest.approx([0.0, -1.0, 0.0, 1.0], abs=1e-5)
    defined, _ = compute_hgpo_outcome_advantage(*args, history_length=1, mode="mean_std_norm")
    assert first_token(defined) == pytest.approx([0.0, -(0.5**0.5), 0.0, 0.5**0.5], abs=1e-5)


def test_hgpo_as_published_leaves_zero_terms_out_of_the_weights() -> None:
    """Three trajectories reach c, with returns 4, 4 and 1: x and y by way of b, u by way of a."""
    anchors = objects("bcbcac")
    traj = objects("xxyyuu")
    step_rewards = torch.tensor([0.0, 4.0, 0.0, 4.0, 0.0, 1.0])
    args = (torch.zeros(6, 1), step_rewards, torch.ones(6, 1, dtype=torch.long), anchors, objects("g" * 6), traj)
    defined, _ = compute_hgpo_outcome_advantage(*args, history_length=1)
    published, _ = compute_hgpo_outcome_advantage(*args, history_length=1, as_published=True)
    # x and y at c: depth 0 deviation 4 - 3 = 1 (weight 1), depth 1 deviation 0 (weight 2).
    assert first_token(defined) == pytest.approx([0.0, 1 / 3, 0.0, 1 / 3, 0.0, -2.0], abs=1e-6)
    assert first_token(published) == pytest.approx([0.0, 1.0, 0.0, 1.0, 0.0, -2.0], abs=1e-6)


def test_hgpo_refuses_a_negative_history() -> None:
    with pytest.raises(ValueError, match="history_length=-1"):
        compute_hgpo_outcome_advantage(*ARGS, history_length=-1)
