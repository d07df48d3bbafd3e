"""Advantages relative to the other attempts at the same task: GRPO, its pass@k form, and RLOO.

A row's score is the sum of its token rewards. With `compute_mean_std_cross_steps` (verl-agent's way) every row of a
task group enters the group's statistics, so a long episode counts once per step; without, each trajectory counts once,
by its first step. Filler rows count nowhere.
"""

from __future__ import annotations

import functools
import logging

import numpy as np
import torch

from gigpo.core_gigpo import episode_norm_reward, on_tokens, one_row_per_trajectory, row_scores
from gigpo.groups import GroupStatistics, factorize, group_statistics
from verl.trainer.ppo.advantage.registry import AdvantageEstimator, AdvantageInputs, register_adv_est

logger = logging.getLogger(__name__)


def score_statistics(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    traj_index: np.ndarray | None,
    cross_steps: bool,
    step_index: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, GroupStatistics]:
    """Scores (rows,), group codes (rows,), rows that count (rows,) bool, and the statistics of each row's group."""
    valid = response_mask.bool()
    scores = row_scores(token_level_rewards, valid)
    groups = factorize(index)
    members = valid.any(dim=-1).cpu().numpy()
    if not cross_steps:
        assert traj_index is not None, "statistics per trajectory need the rows' trajectories"
        members = one_row_per_trajectory(groups, traj_index, members, step_index)
    return scores, groups, members, group_statistics(scores, groups, members)


def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    traj_index: np.ndarray | None = None,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    compute_mean_std_cross_steps: bool = True,
    step_index: np.ndarray | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GRPO (DeepSeekMath, arXiv 2402.03300): (score - group mean) / (group std + epsilon) on every valid token.

    Without `norm_adv_by_std_in_grpo` the std is left out (Dr.GRPO, arXiv 2503.20783). A group of one keeps its score.

    Args:
        token_level_rewards, response_mask: (rows, response_length).
        index, traj_index: (rows,) task group and trajectory.
        epsilon: added to the unbiased standard deviation.
        compute_mean_std_cross_steps, step_index: see the module.

    Returns:
        advantages and returns, (rows, response_length), the same tensor twice.
    """
    advantages = episode_norm_reward(
        token_level_rewards,
        response_mask,
        index,
        traj_index,
        epsilon,
        remove_std=not norm_adv_by_std_in_grpo,
        compute_mean_std_cross_steps=compute_mean_std_cross_steps,
        step_index=step_index,
    )
    return advantages, advantages


def compute_grpo_passk_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    traj_index: np.ndarray | None = None,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    compute_mean_std_cross_steps: bool = True,
    step_index: np.ndarray | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pass@k GRPO (arXiv 2503.19595): the best of a group gets its lead over the second best, everything else 0.

    With `compute_mean_std_cross_steps` the best *row* gets it, which means something for episodes of one step: steps of
    one episode share its reward, so that the two best rows usually tie. Without, trajectories compete, and every row of
    the best one gets its lead. Arguments and returns as in `compute_grpo_outcome_advantage`.

    Raises:
        ValueError: a group has fewer than two that compete.
    """
    scores, groups, members, statistics = score_statistics(
        token_level_rewards, response_mask, index, traj_index, compute_mean_std_cross_steps, step_index
    )
    rows = np.flatnonzero(members)
    too_small = rows[statistics.size[rows] < 2]
    if too_small.size:
        raise ValueError(
            f"algorithm.adv_estimator=grpo_passk needs two attempts per task, and group {index[too_small[0]]} has one: "
            "set env.rollout.n to 2 or more"
        )
    # Sorted by group, then score falling, then position: a group's first is its best, the next one its second best.
    ranked = rows[np.lexsort((rows, -scores[rows], groups[rows]))]
    first = np.flatnonzero(np.diff(groups[ranked], prepend=-1))
    best, second = ranked[first], ranked[np.minimum(first + 1, ranked.size - 1)]
    lead = scores[best] - scores[second]
    if norm_adv_by_std_in_grpo:
        lead = lead / (statistics.std[best] + epsilon)
    values = np.zeros_like(scores)
    values[best] = lead
    if not compute_mean_std_cross_steps:
        trajectories = factorize(zip(groups.tolist(), traj_index, strict=True))
        lead_of = np.zeros(int(trajectories.max(initial=-1)) + 1)
        lead_of[trajectories[best]] = lead
        values = lead_of[trajectories]
    advantages = on_tokens(values, response_mask.bool())
    return advantages, advantages


def compute_rloo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    traj_index: np.ndarray | None = None,
    epsilon: float = 1e-6,
    compute_mean_std_cross_steps: bool = True,
    step_index: np.ndarray | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RLOO (arXiv 2402.14740): score - mean of the others = n / (n - 1) (score - group mean). A group of one keeps
    its score.

    `epsilon` is unused and stays for the signature. Arguments and returns as in `compute_grpo_outcome_advantage`.
    """
    scores, _, _, statistics = score_statistics(
        token_level_rewards, response_mask, index, traj_index, compute_mean_std_cross_steps, step_index
    )
    size = statistics.size
    leave_one_out = statistics.deviation * size / np.maximum(size - 1, 1)
    advantages = on_tokens(np.where(size < 2, scores, leave_one_out), response_mask.bool())
    return advantages, advantages


@functools.cache
def warn_of_ties_between_steps() -> None:
    """Say once that pass@k over steps gives next to nothing."""
    logger.warning(
        "grpo_passk compares steps, and steps of one episode share its reward: the best has no lead and gets no "
        "advantage. Set algorithm.compute_mean_std_cross_steps=False to compare episodes"
    )


@register_adv_est(AdvantageEstimator.GRPO)
def grpo(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """GRPO; Dr.GRPO with `norm_adv_by_std_in_grpo=False` and `actor.loss_agg_mode=seq-mean-token-sum-norm`."""
    return compute_grpo_outcome_advantage(
        **inputs.group_arguments(), norm_adv_by_std_in_grpo=inputs.config.norm_adv_by_std_in_grpo
    )


@register_adv_est(AdvantageEstimator.GRPO_PASSK)
def grpo_passk(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Pass@k GRPO."""
    if inputs.config.compute_mean_std_cross_steps and len(set(inputs.traj_index)) < len(inputs.traj_index):
        warn_of_ties_between_steps()
    return compute_grpo_passk_outcome_advantage(
        **inputs.group_arguments(), norm_adv_by_std_in_grpo=inputs.config.norm_adv_by_std_in_grpo
    )


@register_adv_est(AdvantageEstimator.RLOO)
def rloo(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """RLOO."""
    return compute_rloo_outcome_advantage(**inputs.group_arguments())
