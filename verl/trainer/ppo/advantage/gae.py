"""Generalised advantage estimation over the tokens of a response (arXiv 1506.02438, eq. 16)."""

from __future__ import annotations

import torch

from verl.trainer.ppo.advantage.registry import AdvantageEstimator, AdvantageInputs, register_adv_est
from verl.trainer.ppo.advantage.scan import ValidFirst, row_blocks, suffix_sums
from verl.utils.torch_functional import masked_whiten


def gae_scan(
    token_level_rewards: torch.Tensor, values: torch.Tensor, response_mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages before whitening, and returns; both (rows, response_length), 0 at masked positions.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}, where t + 1 is the next *valid* token and
    nothing follows the last one. Whatever the critic predicts behind the end of a response has no influence.
    """
    advantages = torch.empty_like(values)
    returns = torch.empty_like(values)
    for block in row_blocks(len(values)):
        tokens = ValidFirst(response_mask[block].bool())
        predicted = tokens.front(values[block])
        delta = tokens.front(token_level_rewards[block]) - predicted
        delta[:, :-1] += gamma * predicted[:, 1:]
        ahead = suffix_sums(delta, gamma * lam)
        advantages[block] = tokens.back(ahead)
        returns[block] = tokens.back(ahead + predicted)
    return advantages, returns


def compute_gae_advantage_return(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float | torch.Tensor,
    lam: float | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE with advantages whitened over the valid tokens of the batch.

    Args:
        token_level_rewards, values, response_mask: (rows, response_length).
        gamma, lam: discount and lambda, per token.

    Returns:
        advantages (whitened, 0 at masked positions) and returns (advantage before whitening + value).
    """
    with torch.no_grad():
        advantages, returns = gae_scan(token_level_rewards, values, response_mask, float(gamma), float(lam))
        return masked_whiten(advantages, response_mask) * response_mask, returns


@register_adv_est(AdvantageEstimator.GAE)
def gae(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """`compute_gae_advantage_return` with the critic's values."""
    values = inputs.tensor("values", "the critic's predictions; GAE trains a critic beside the actor")
    return compute_gae_advantage_return(
        inputs.token_level_rewards, values, inputs.response_mask, inputs.config.gamma, inputs.config.lam
    )
