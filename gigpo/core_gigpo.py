"""GiGPO: group-in-group policy optimisation (arXiv 2505.10978).

The unit is a row: one step of one episode. Episodes that start from the same task form a *group* (`index`, the row's
`uid`); steps of a group that see the same environment state, its *anchor*, form a *step group*, across episodes and
times.

    episode term   A_E(i, t) = (R_i - mean over the group) / F          R_i the episode's reward
    step term      A_S(i, t) = (G_it - mean over the step group) / F    G_it = sum over k of gamma^k r_i,t+k
    advantage      A = A_E + w * A_S                                    the same for every token of the response

F is 1 for `mean_norm` and the standard deviation for `mean_std_norm`. A group of one keeps its episode reward as it is
(mean 0, F 1); a step group of one has step term 0. Rows without a valid token (fillers) enter no statistic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gigpo.anchors import are_similar, build_step_group, summarize_group_size, to_hashable
from gigpo.groups import combine, factorize, first_of_each, group_statistics

__all__ = [
    "GigpoTerms",
    "are_similar",
    "build_step_group",
    "compute_gigpo_outcome_advantage",
    "compute_step_discounted_returns",
    "episode_norm_reward",
    "gigpo_metrics",
    "gigpo_terms",
    "step_norm_reward",
    "summarize_group_size",
    "to_hashable",
]

MODES = ("mean_norm", "mean_std_norm")


# --------------------------------------------------------------------------------------------- step returns


def compute_step_discounted_returns(batch: Any, gamma: float) -> torch.Tensor:
    """Discounted return of every step: G_t = r_t + gamma * G_{t+1} along its own trajectory.

    Args:
        batch: a DataProto with the arrays `rewards` (N,) and `traj_uid` (N,) in `non_tensor_batch`, and, if present,
            `step_index` (N,) for the order in time (else rows of a trajectory are in order of time) and `active_masks`
            (all true).
        gamma: discount per environment step.

    Returns:
        (N,) float32. Rewards 0, 0, 10 with gamma 0.95 give 9.025, 9.5, 10.

    Raises:
        ValueError: a reward is not a finite number; names the trajectory.
    """
    arrays = batch.non_tensor_batch
    if "active_masks" in arrays:
        assert np.all(arrays["active_masks"].astype(bool)), "rows of finished episodes must be dropped before returns"
    rewards = np.asarray(arrays["rewards"], dtype=np.float64).reshape(-1)
    check_finite(rewards, arrays["traj_uid"], "environment reward")
    trajectories = factorize(arrays["traj_uid"])
    order = time_order(trajectories, arrays.get("step_index"))  # rows sorted by trajectory, then time
    steps_left = steps_to_the_end(trajectories[order])

    returns = rewards[order]
    # Second-to-last steps of all trajectories at once, then third-to-last, …: as many passes as the longest episode has
    # steps.
    by_distance = np.argsort(steps_left, kind="stable")
    borders = np.searchsorted(steps_left[by_distance], np.arange(1, steps_left.max(initial=0) + 2))
    for begin, end in zip(borders[:-1], borders[1:], strict=True):
        rows = by_distance[begin:end]
        returns[rows] += gamma * returns[rows + 1]
    result = np.empty_like(returns)
    result[order] = returns
    return torch.from_numpy(result.astype(np.float32))


def time_order(trajectories: np.ndarray, step_index: np.ndarray | None) -> np.ndarray:
    """(N,) indices that sort rows by trajectory and, within it, by step index or else by position."""
    position = np.arange(trajectories.size)
    time = position if step_index is None else np.asarray(step_index, dtype=np.int64)
    return np.lexsort((position, time, trajectories))


def steps_to_the_end(sorted_trajectories: np.ndarray) -> np.ndarray:
    """(N,) int: rows of the same trajectory that follow, for rows sorted by trajectory."""
    lengths = np.bincount(sorted_trajectories)
    ends = np.cumsum(lengths)[sorted_trajectories]
    return ends - 1 - np.arange(sorted_trajectories.size)


def check_finite(values: np.ndarray, traj_uid: Sequence[Any] | None, what: str) -> None:
    """Raise `ValueError` naming trajectory and row of the first value (N,) that is NaN or infinite."""
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        row = int(bad[0])
        owner = f"trajectory {traj_uid[row]}" if traj_uid is not None else "a trajectory without an id"
        raise ValueError(
            f"{what} is {values[row]} in {owner} (row {row}; {bad.size} of {values.size} rows are affected): "
            "the environment or reward function must return finite numbers"
        )


# --------------------------------------------------------------------------------------------- the advantage


@dataclass(frozen=True)
class GigpoTerms:
    """What the advantage is made of. All arrays (N,).

    Attributes:
        episode, step: float64, the two terms before weighting.
        step_groups: int64, the step group of each row.
        members: bool, false for rows without a valid token.
    """

    episode: np.ndarray
    step: np.ndarray
    step_groups: np.ndarray
    members: np.ndarray


def compute_gigpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    step_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    anchor_obs: np.ndarray,
    index: np.ndarray,
    traj_index: np.ndarray,
    epsilon: float = 1e-6,
    step_advantage_w: float = 1.0,
    mode: str = "mean_norm",
    enable_similarity: bool = False,
    similarity_thresh: float = 0.95,
    compute_mean_std_cross_steps: bool = True,
    step_index: np.ndarray | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GiGPO's advantage: episode term + `step_advantage_w` * step term.

    Args:
        token_level_rewards: (N, R) rewards on tokens; a row's sum is its episode's reward less its own penalties.
        step_rewards: (N,) discounted step returns, see `compute_step_discounted_returns`.
        response_mask: (N, R), 1 for valid response tokens.
        anchor_obs: (N,) environment states, anything `to_hashable` takes.
        index, traj_index: (N,) task group and trajectory of each row.
        epsilon: added to the standard deviation.
        step_advantage_w: weight w of the step term.
        mode: `mean_norm` or `mean_std_norm`.
        enable_similarity, similarity_thresh: group texts that are alike rather than equal, see `build_step_group`.
        compute_mean_std_cross_steps: whether every step or one step per trajectory enters the episode statistics.
        step_index: (N,) time of a row within its trajectory, for the latter.

    Returns:
        advantages and returns, (N, R), the same tensor twice.

    Raises:
        ValueError: unknown mode.
    """
    terms = gigpo_terms(
        token_level_rewards,
        step_rewards,
        response_mask,
        anchor_obs,
        index,
        traj_index,
        epsilon,
        mode,
        enable_similarity,
        similarity_thresh,
        compute_mean_std_cross_steps,
        step_index,
    )
    advantages = on_tokens(terms.episode + step_advantage_w * terms.step, response_mask.bool())
    return advantages, advantages


def gigpo_terms(
    token_level_rewards: torch.Tensor,
    step_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    anchor_obs: np.ndarray,
    index: np.ndarray,
    traj_index: np.ndarray,
    epsilon: float = 1e-6,
    mode: str = "mean_norm",
    enable_similarity: bool = False,
    similarity_thresh: float = 0.95,
    compute_mean_std_cross_steps: bool = True,
    step_index: np.ndarray | None = None,
) -> GigpoTerms:
    """The two terms of the advantage, one number a row each; arguments as in `compute_gigpo_outcome_advantage`."""
    remove_std = removes_std(mode)
    valid = response_mask.bool()
    members = valid.any(dim=-1).cpu().numpy()
    groups = factorize(index)
    counted = members
    if not compute_mean_std_cross_steps:
        counted = one_row_per_trajectory(groups, traj_index, members, step_index)
    step_groups = build_step_group(anchor_obs, index, enable_similarity, similarity_thresh)
    return GigpoTerms(
        episode=episode_values(row_scores(token_level_rewards, valid), groups, counted, epsilon, remove_std),
        step=step_values(step_rewards, step_groups, members, epsilon, remove_std),
        step_groups=step_groups,
        members=members,
    )


def removes_std(mode: str) -> bool:
    """Whether a normalisation mode leaves the standard deviation out. Raises `ValueError` for an unknown one."""
    if mode not in MODES:
        raise ValueError(f"algorithm.gigpo.mode={mode!r} is not known: use one of {', '.join(MODES)}")
    return mode == "mean_norm"


def episode_norm_reward(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    traj_index: np.ndarray,
    epsilon: float = 1e-6,
    remove_std: bool = True,
    compute_mean_std_cross_steps: bool = True,
    step_index: np.ndarray | None = None,
) -> torch.Tensor:
    """Episode term, (N, R): a row's reward relative to its task group, the same on each of its valid tokens.

    With `compute_mean_std_cross_steps` every step counts in mean and standard deviation, so long episodes count more;
    without, each trajectory's first step stands for it. A group of one keeps its reward. Arguments as above.
    """
    valid = response_mask.bool()
    members = valid.any(dim=-1).cpu().numpy()
    groups = factorize(index)
    if not compute_mean_std_cross_steps:
        members = one_row_per_trajectory(groups, traj_index, members, step_index)
    scores = row_scores(token_level_rewards, valid)
    return on_tokens(episode_values(scores, groups, members, epsilon, remove_std), valid)


def step_norm_reward(
    step_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    remove_std: bool = True,
) -> torch.Tensor:
    """Step term, (N, R): a row's discounted return relative to its step group `index` (N,). A group of one gives 0."""
    valid = response_mask.bool()
    members = valid.any(dim=-1).cpu().numpy()
    return on_tokens(step_values(step_rewards, factorize(index), members, epsilon, remove_std), valid)


def episode_values(
    scores: np.ndarray, groups: np.ndarray, members: np.ndarray, epsilon: float, remove_std: bool
) -> np.ndarray:
    """Episode term per row, (N,): scores against the `members` of their group; a group of one keeps its score."""
    statistics = group_statistics(scores, groups, members)
    alone = statistics.size < 2
    deviation = np.where(alone, scores, statistics.deviation)
    return deviation if remove_std else deviation / (np.where(alone, 1.0, statistics.std) + epsilon)


def step_values(
    step_rewards: torch.Tensor, step_groups: np.ndarray, members: np.ndarray, epsilon: float, remove_std: bool
) -> np.ndarray:
    """Step term per row, (N,): returns against the `members` of their step group; 0 for a group of one."""
    statistics = group_statistics(step_rewards.detach().double().cpu().numpy(), step_groups, members)
    deviation = np.where(statistics.size < 2, 0.0, statistics.deviation)
    return deviation if remove_std else deviation / (statistics.std + epsilon)


def row_scores(token_level_rewards: torch.Tensor, valid: torch.Tensor) -> np.ndarray:
    """Sum of each row's rewards over its valid tokens, (N,) float64, of (N, R) tensors."""
    return torch.where(valid, token_level_rewards, 0.0).sum(dim=-1).double().cpu().numpy()


def one_row_per_trajectory(
    groups: np.ndarray, traj_index: np.ndarray, members: np.ndarray, step_index: np.ndarray | None
) -> np.ndarray:
    """(N,) bool: of each trajectory's rows among `members`, the earliest."""
    chosen = np.zeros_like(members)
    rows = np.flatnonzero(members)
    trajectories = combine(groups[rows], factorize(np.asarray(traj_index, dtype=object)[rows]))
    chosen[rows] = first_of_each(trajectories, None if step_index is None else np.asarray(step_index)[rows])
    return chosen


def on_tokens(values: np.ndarray, valid: torch.Tensor) -> torch.Tensor:
    """Each row's value (N,) on its valid tokens (N, R) and 0 elsewhere: (N, R) float32."""
    column = torch.from_numpy(values.astype(np.float32)).to(valid.device).unsqueeze(-1)
    return torch.where(valid, column, 0.0)


# --------------------------------------------------------------------------------------------- what to watch


def gigpo_metrics(terms: GigpoTerms) -> dict[str, float]:
    """What tells whether the step term does anything.

    Returns:
        `gigpo/anchor_group_size/{mean,max}` over step groups; `gigpo/singleton_share`, the share of steps alone in
        their group; `gigpo/zero_step_advantage_share`, the share of steps whose step term is 0;
        `gigpo/{episode,step}_advantage_rms`, root mean square over steps; `gigpo/terms_correlation`, Pearson's over
        steps (0 where a term is constant); `gigpo/step_only_share`, how much of the step term, in squares, lies on
        steps whose episode term is at most a tenth of it: what the step term alone asks for, as in a group whose
        episodes were all solved. Empty when there are no steps.
    """
    if not terms.members.any():
        return {}
    sizes = np.bincount(factorize(terms.step_groups[terms.members]))
    episode, step = terms.episode[terms.members], terms.step[terms.members]
    varies = episode.std() > 0 and step.std() > 0
    alone = np.abs(episode) <= 0.1 * np.abs(step)
    return {
        "gigpo/anchor_group_size/mean": float(sizes.mean()),
        "gigpo/anchor_group_size/max": float(sizes.max()),
        "gigpo/singleton_share": float((sizes == 1).sum() / sizes.sum()),
        "gigpo/zero_step_advantage_share": float((step == 0.0).mean()),
        "gigpo/episode_advantage_rms": float(np.sqrt(np.mean(episode**2))),
        "gigpo/step_advantage_rms": float(np.sqrt(np.mean(step**2))),
        "gigpo/terms_correlation": float(np.corrcoef(episode, step)[0, 1]) if varies else 0.0,
        "gigpo/step_only_share": float((step**2)[alone].sum() / max(float((step**2).sum()), 1e-12)),
    }
