"""HGPO: hierarchy-of-groups policy optimisation (arXiv 2602.22817).

GiGPO compares steps that see the same state. How a state was reached matters too, so HGPO compares each step within
groups of growing strictness: G_k holds the steps of a task whose current state and whose last k states before it are
the same. G_0 is GiGPO's step group, and G_0 contains G_1 contains … G_K. With G the discounted step return,

    a_k = (G - mean over G_k) / F        over every group of at least two steps
    A   = sum of w_k a_k / sum of w_k    w_k = (k + 1)^alpha

and 0 for a step that is alone at every depth. The step advantage takes the place of GiGPO's sum; an episode term can be
added with its own weight.
"""

from __future__ import annotations

import numpy as np
import torch

from gigpo.anchors import anchor_key
from gigpo.core_gigpo import episode_norm_reward, on_tokens, removes_std, steps_to_the_end, time_order
from gigpo.groups import combine, factorize, group_statistics

NO_GROUP = -1


def compute_hgpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    step_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    anchor_obs: np.ndarray,
    index: np.ndarray,
    traj_index: np.ndarray,
    history_length: int,
    epsilon: float = 1e-6,
    weight_alpha: float = 1.0,
    mode: str = "mean_norm",
    episode_advantage_w: float = 0.0,
    as_published: bool = False,
    compute_mean_std_cross_steps: bool = True,
    step_index: np.ndarray | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """HGPO's advantage.

    Args:
        token_level_rewards, step_rewards, response_mask, anchor_obs, index, traj_index, step_index: as in
            `compute_gigpo_outcome_advantage`.
        history_length: K, the longest history compared (`env.history_length`, what the prompt shows).
        epsilon: added to the standard deviation.
        weight_alpha: exponent of the weights; 0 is a plain mean over depths.
        mode: `mean_norm` (F = 1) or `mean_std_norm` (F = standard deviation + epsilon).
        episode_advantage_w: weight of GiGPO's episode term; the paper has none.
        as_published: do as the authors' code does where it departs from the definition: terms that are exactly 0 do not
            enter the sum of weights, and the standard deviation is the biased one.
        compute_mean_std_cross_steps: concerns the episode term alone.

    Returns:
        advantages and returns, (N, R), the same tensor twice.

    Raises:
        ValueError: unknown mode, negative history length.
    """
    remove_std = removes_std(mode)
    valid = response_mask.bool()
    returns = step_rewards.detach().double().cpu().numpy()
    members = valid.any(dim=-1).cpu().numpy()
    weighted, weights = np.zeros(returns.size), np.zeros(returns.size)
    for depth, groups in enumerate(history_groups(anchor_obs, index, traj_index, history_length, members, step_index)):
        rows = np.flatnonzero(groups != NO_GROUP)
        statistics = group_statistics(returns[rows], factorize(groups[rows]), unbiased=not as_published)
        term = statistics.deviation if remove_std else statistics.deviation / (statistics.std + epsilon)
        counts = statistics.size > 1
        if as_published:
            counts &= term != 0.0
        weight = counts * float(depth + 1) ** weight_alpha
        weighted[rows] += weight * term
        weights[rows] += weight
    advantages = on_tokens(weighted / np.where(weights > 0, weights, 1.0), valid)
    if episode_advantage_w:
        advantages = advantages + episode_advantage_w * episode_norm_reward(
            token_level_rewards,
            response_mask,
            index,
            traj_index,
            epsilon,
            remove_std,
            compute_mean_std_cross_steps,
            step_index,
        )
    return advantages, advantages


def history_groups(
    anchor_obs: np.ndarray,
    index: np.ndarray,
    traj_index: np.ndarray,
    history_length: int,
    members: np.ndarray | None = None,
    step_index: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Groups at depths 0 … `history_length`, each (N,) int64.

    `NO_GROUP` marks rows that have fewer predecessors than the depth, and rows that are not `members` (N,) bool. One
    trajectory with states a, b, a, b, depth 1: [-1, 0, 1, 0].

    Raises:
        ValueError: negative history length.
    """
    if history_length < 0:
        raise ValueError(
            f"algorithm.hgpo.history_length={history_length} must be 0 or more (env.history_length is meant)"
        )
    count = len(anchor_obs)
    members = np.ones(count, dtype=bool) if members is None else members
    tasks = factorize(index)
    states = combine(tasks, factorize(anchor_key(anchor) for anchor in anchor_obs))
    trajectories = combine(tasks, factorize(traj_index))
    order = time_order(trajectories, step_index)
    lengths = np.bincount(trajectories)
    age = np.empty(count, dtype=np.int64)  # how many steps of the same trajectory came before
    age[order] = lengths[trajectories[order]] - 1 - steps_to_the_end(trajectories[order])
    place = np.empty(count, dtype=np.int64)
    place[order] = np.arange(count)

    depths = [np.where(members, states, NO_GROUP)]
    current = states
    for depth in range(1, history_length + 1):
        reaches_back = age >= depth
        before = order[np.maximum(place - depth, 0)]  # the row `depth` steps earlier, where there is one
        current = combine(current, states[before])
        depths.append(np.where(reaches_back & members, current, NO_GROUP))
    return depths
