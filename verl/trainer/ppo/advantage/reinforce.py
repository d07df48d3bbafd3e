"""REINFORCE with a baseline: REINFORCE++, its group-mean form, and ReMax."""

from __future__ import annotations

import numpy as np
import torch

from gigpo.core_gigpo import on_tokens
from verl.trainer.ppo.advantage.group_relative import score_statistics
from verl.trainer.ppo.advantage.registry import AdvantageEstimator, AdvantageInputs, register_adv_est
from verl.trainer.ppo.advantage.scan import ValidFirst, row_blocks, suffix_sums
from verl.utils.torch_functional import masked_whiten


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, gamma: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++ (arXiv 2501.03262): discounted return of every token, whitened over the valid tokens of the batch.

    Args:
        token_level_rewards, response_mask: (rows, response_length).
        gamma: discount per token.

    Returns:
        advantages (whitened, 0 at masked positions) and returns (not whitened).
    """
    with torch.no_grad():
        returns = torch.empty_like(token_level_rewards)
        for block in row_blocks(len(returns)):
            tokens = ValidFirst(response_mask[block].bool())
            returns[block] = tokens.back(suffix_sums(tokens.front(token_level_rewards[block]), float(gamma)))
        return masked_whiten(returns, response_mask) * response_mask, returns


def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    traj_index: np.ndarray | None = None,
    epsilon: float = 1e-6,
    compute_mean_std_cross_steps: bool = True,
    step_index: np.ndarray | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++-baseline: score - mean of its task group, on every token, whitened over the batch.

    A group of one keeps its score. `epsilon` is unused and stays for the signature. Arguments as in
    `compute_grpo_outcome_advantage`.

    Returns:
        advantages and returns, (rows, response_length), the same tensor twice.
    """
    scores, _, _, statistics = score_statistics(
        token_level_rewards, response_mask, index, traj_index, compute_mean_std_cross_steps, step_index
    )
    centred = on_tokens(np.where(statistics.size < 2, scores, statistics.deviation), response_mask.bool())
    advantages = masked_whiten(centred, response_mask) * response_mask
    return advantages, advantages


def compute_remax_outcome_advantage(
    token_level_rewards: torch.Tensor, reward_baselines: torch.Tensor, response_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """ReMax (arXiv 2310.10505): return of each token less the return of a greedy episode of the same task.

    Args:
        token_level_rewards, response_mask: (rows, response_length).
        reward_baselines: (rows,) reward of the greedy episode.

    Returns:
        advantages and returns (rewards from here to the end), both (rows, response_length).
    """
    with torch.no_grad():
        rewards = torch.where(response_mask.bool(), token_level_rewards, 0.0)
        returns = rewards.flip(dims=[-1]).cumsum(dim=-1).flip(dims=[-1])
        advantages = (returns - reward_baselines.to(returns.dtype).unsqueeze(-1)) * response_mask
        return advantages, returns


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS)
def reinforce_plus_plus(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++."""
    return compute_reinforce_plus_plus_outcome_advantage(
        inputs.token_level_rewards, inputs.response_mask, inputs.config.gamma
    )


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE)
def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++-baseline."""
    return compute_reinforce_plus_plus_baseline_outcome_advantage(**inputs.group_arguments())


@register_adv_est(AdvantageEstimator.REMAX)
def remax(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """ReMax with the baselines that the rollout put into `reward_baselines`."""
    baselines = inputs.tensor("reward_baselines", "the reward of a greedy episode of each row's task")
    return compute_remax_outcome_advantage(inputs.token_level_rewards, baselines, inputs.response_mask)
