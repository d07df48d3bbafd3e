"""GiGPO: group-in-group policy optimisation (arXiv 2505.10978).

The unit is a row: one step of one episode. Episodes that start from the same task form a *group* (`index`, the row's
`uid`); steps of a group that see the same environment state, its *anchor*, form a *step group*, across episodes and times.

    episode term   A_E(i, t) = (R_i - mean over the group) / F          R_i the episode's reward
    step term      A_S(i, t) = (G_it - mean over the step group) / F    G_it = sum over k of gamma^k r_i,t+k
    advantage      A = A_E + w * A_S                                    the same for every token of the response

F is 1 for `mean_norm` and the standard deviation for `mean_std_norm`. A group of one keeps its episode reward as it is
(mean 0, F 1); a step group of one has step term 0. Rows without a valid token (fillers) enter no statistic.
"""

from __future__ import annotations

import hashlib
import logging
from difflib import SequenceMatcher
from typing import Any, Hashable, Sequence

import numpy as np
import torch

from gigpo.groups import combine, factorize, first_of_each, group_statistics

logger = logging.getLogger(__name__)

MODES = ("mean_norm", "mean_std_norm")


# --------------------------------------------------------------------------------------------- step returns


def compute_step_discounted_returns(batch: Any, gamma: float) -> torch.Tensor:
    """Discounted return of every step: G_t = r_t + gamma * G_{t+1} along its own trajectory.

    Args:
        batch: a DataProto with the arrays `rewards` (N,) and `traj_uid` (N,) in `non_tensor_batch`, and, if present, `step_index`
            (N,) for the order in time (else rows of a trajectory are in order of time) and `active_masks` (all true).
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
    # Second-to-last steps of all trajectories at once, then third-to-last, …: as many passes as the longest episode has steps.
    by_distance = np.argsort(steps_left, kind="stable")
    borders = np.searchsorted(steps_left[by_distance], np.arange(1, steps_left.max(initial=0) + 2))
    for begin, end in zip(borders[:-1], borders[1:]):
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
    remove_std = removes_std(mode)
    valid = response_mask.bool()
    members = valid.any(dim=-1).cpu().numpy()
    groups = factorize(index)
    counted = members if compute_mean_std_cross_steps else one_row_per_trajectory(groups, traj_index, members, step_index)
    episode = episode_values(row_scores(token_level_rewards, valid), groups, counted, epsilon, remove_std)
    step_groups = build_step_group(anchor_obs, index, enable_similarity, similarity_thresh)
    step = step_values(step_rewards, step_groups, members, epsilon, remove_std)
    advantages = on_tokens(episode + step_advantage_w * step, valid)
    return advantages, advantages


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
    return on_tokens(episode_values(row_scores(token_level_rewards, valid), groups, members, epsilon, remove_std), valid)


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


# --------------------------------------------------------------------------------------------- step groups


def build_step_group(
    anchor_obs: np.ndarray,
    index: np.ndarray,
    enable_similarity: bool = False,
    similarity_thresh: float = 0.95,
    summarize: bool = False,
) -> np.ndarray:
    """Which rows saw the same state within the same task group.

    Args:
        anchor_obs: (N,) states. Equal states share a group; arrays (images) are compared by their bytes.
        index: (N,) task group of each row.
        enable_similarity: join texts whose similarity reaches `similarity_thresh` instead: each row joins the first
            existing step group whose first member it resembles (so the result depends on the order of rows).
        summarize: log how many step groups there are of each size.

    Returns:
        (N,) int64, the row's step group; groups of different tasks never share a number.

    Raises:
        ValueError: similarity asked for states that are not text, or a threshold outside (0, 1).
        TypeError: a state that cannot be compared.
    """
    tasks = factorize(index)
    if enable_similarity:
        check_similarity(anchor_obs, similarity_thresh)
        step_groups = similar_groups(anchor_obs, tasks, similarity_thresh)
    else:
        step_groups = combine(tasks, factorize(anchor_key(anchor) for anchor in anchor_obs))
    sizes = np.bincount(step_groups)
    if summarize:
        summarize_group_size(sizes.tolist())
    return step_groups


def check_similarity(anchor_obs: np.ndarray, threshold: float) -> None:
    """Raise `ValueError` where similarity grouping cannot work."""
    if not 0.0 < threshold < 1.0:
        raise ValueError(f"algorithm.gigpo.similarity_thresh={threshold} must lie strictly between 0 and 1")
    if not all(isinstance(anchor, str) for anchor in anchor_obs):
        raise ValueError("algorithm.gigpo.enable_similarity=True compares texts, and this environment's anchors are not: set it to False")


def similar_groups(anchor_obs: np.ndarray, tasks: np.ndarray, threshold: float) -> np.ndarray:
    """Greedy clustering within each task: (N,) codes. A text seen before goes where it went, without a comparison."""
    step_groups = np.empty(len(tasks), dtype=np.int64)
    founders: dict[int, list[tuple[str, int]]] = {}  # task -> (first member's text, step group) in order of founding
    known: dict[tuple[int, str], int] = {}
    count = 0
    for row, (task, text) in enumerate(zip(tasks.tolist(), anchor_obs)):
        group = known.get((task, text))
        if group is None:
            group = first_similar(founders.setdefault(task, []), text, threshold)
            if group is None:
                group = count
                count += 1
                founders[task].append((text, group))
            known[(task, text)] = group
        step_groups[row] = group
    return step_groups


def first_similar(founders: Sequence[tuple[str, int]], text: str, threshold: float) -> int | None:
    """The first founder's group that `text` resembles, else None."""
    matcher = SequenceMatcher(None)
    matcher.set_seq2(text)  # the matcher keeps what it learns of the second text
    for founder, group in founders:
        matcher.set_seq1(founder)
        if reaches(matcher, threshold):
            return group
    return None


def are_similar(a: str, b: str, threshold: float = 0.95) -> bool:
    """Whether two texts' Ratcliff-Obershelp ratio reaches `threshold`. Raises `ValueError` for anything but text."""
    if not isinstance(a, str) or not isinstance(b, str):
        raise ValueError("similarity is defined for texts alone")
    return reaches(SequenceMatcher(None, a, b), threshold)


def reaches(matcher: SequenceMatcher, threshold: float) -> bool:
    """ratio() >= threshold, with its two cheap upper bounds asked first."""
    return matcher.real_quick_ratio() >= threshold and matcher.quick_ratio() >= threshold and matcher.ratio() >= threshold


def anchor_key(anchor: Any) -> Hashable:
    """A small hashable that is equal for equal states: numeric arrays become a digest of shape, type and bytes."""
    if isinstance(anchor, str):
        return anchor
    if isinstance(anchor, np.ndarray) and anchor.dtype != object:
        content = np.ascontiguousarray(anchor)
        digest = hashlib.blake2b(content.view(np.uint8).reshape(-1), digest_size=16).digest() if content.size else b""
        return ("array", content.shape, content.dtype.str, digest)
    if isinstance(anchor, (list, tuple)):
        return tuple(anchor_key(item) for item in anchor)
    if isinstance(anchor, dict):
        return tuple(sorted((key, anchor_key(value)) for key, value in anchor.items()))
    return to_hashable(anchor)


def to_hashable(x: Any) -> Hashable:
    """A hashable of the same content: scalars as they are, arrays flattened to tuples, dicts as sorted pairs.

    Raises:
        TypeError: anything else.
    """
    if isinstance(x, (bool, int, float, str)):
        return x
    if isinstance(x, np.generic):
        return x.item()
    if isinstance(x, np.ndarray):
        return tuple(x.flatten().tolist())
    if isinstance(x, (list, tuple)):
        return tuple(to_hashable(item) for item in x)
    if isinstance(x, dict):
        return tuple(sorted((key, to_hashable(value)) for key, value in x.items()))
    raise TypeError(f"an anchor of type {type(x).__name__} cannot be compared: use text, numbers, arrays, or lists and dicts of them")


# --------------------------------------------------------------------------------------------- what to watch


def summarize_group_size(group_size: list[int]) -> None:
    """Log how many groups there are of each size, and their mean size."""
    if not group_size:
        logger.info("step groups: none")
        return
    sizes, counts = np.unique(np.asarray(group_size), return_counts=True)
    shares = ", ".join(f"{count} of size {size}" for size, count in zip(sizes, counts))
    logger.info("step groups: %d, mean size %.2f (%s)", len(group_size), float(np.mean(group_size)), shares)


def gigpo_metrics(
    step_groups: np.ndarray, response_mask: torch.Tensor, episode_advantage: torch.Tensor, step_advantage: torch.Tensor
) -> dict[str, float]:
    """What tells whether the step term does anything.

    Args:
        step_groups: (N,) codes from `build_step_group`.
        response_mask: (N, R); rows without a valid token are left out.
        episode_advantage, step_advantage: (N, R) the two terms before weighting.

    Returns:
        `gigpo/anchor_group_size/{mean,max}` over step groups; `gigpo/singleton_share`, the share of steps alone in their group;
        `gigpo/zero_step_advantage_share`, the share of steps whose step term is 0; `gigpo/{episode,step}_advantage_rms`, root mean
        square over steps.
    """
    valid = response_mask.bool()
    rows = valid.any(dim=-1)
    if not bool(rows.any()):
        return {}
    sizes = np.bincount(factorize(step_groups[rows.cpu().numpy()]))
    tokens = valid.sum(dim=-1)[rows]
    episode = episode_advantage.sum(dim=-1)[rows] / tokens  # (steps,): the value every token of the row has
    step = step_advantage.sum(dim=-1)[rows] / tokens
    return {
        "gigpo/anchor_group_size/mean": float(sizes.mean()),
        "gigpo/anchor_group_size/max": float(sizes.max()),
        "gigpo/singleton_share": float((sizes == 1).sum() / sizes.sum()),
        "gigpo/zero_step_advantage_share": float((step == 0).float().mean()),
        "gigpo/episode_advantage_rms": float(episode.square().mean().sqrt()),
        "gigpo/step_advantage_rms": float(step.square().mean().sqrt()),
    }
