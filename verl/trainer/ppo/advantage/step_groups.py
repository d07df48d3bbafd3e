"""GiGPO and HGPO as registered estimators; the mathematics is in the `gigpo` package."""

from __future__ import annotations

import torch

from gigpo.core_gigpo import gigpo_metrics, gigpo_terms, on_tokens
from gigpo.hgpo import compute_hgpo_outcome_advantage
from verl.trainer.ppo.advantage.registry import AdvantageEstimator, AdvantageInputs, register_adv_est

_ANCHOR = "the environment's observation without history or prompt; its manager returns it as `anchor`"
_STEP_REWARDS = "the discounted return of each step, gigpo.core_gigpo.compute_step_discounted_returns"


@register_adv_est(AdvantageEstimator.GiGPO)
def gigpo(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """GiGPO with the settings of `algorithm.gigpo`; adds `gigpo/*` metrics."""
    settings = inputs.config.gigpo
    terms = gigpo_terms(
        inputs.token_level_rewards,
        inputs.tensor("step_rewards", _STEP_REWARDS),
        inputs.response_mask,
        inputs.array("anchor_obs", _ANCHOR),
        inputs.index,
        inputs.traj_index,
        mode=settings.mode,
        enable_similarity=settings.enable_similarity,
        similarity_thresh=settings.similarity_thresh,
        compute_mean_std_cross_steps=inputs.config.compute_mean_std_cross_steps,
        step_index=inputs.step_index,
    )
    inputs.metrics.update(gigpo_metrics(terms))
    advantages = on_tokens(terms.episode + settings.step_advantage_w * terms.step, inputs.response_mask.bool())
    return advantages, advantages


@register_adv_est(AdvantageEstimator.HGPO)
def hgpo(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """HGPO with the settings of `algorithm.hgpo`."""
    settings = inputs.config.hgpo
    return compute_hgpo_outcome_advantage(
        inputs.token_level_rewards,
        inputs.tensor("step_rewards", _STEP_REWARDS),
        inputs.response_mask,
        inputs.array("anchor_obs", _ANCHOR),
        inputs.index,
        inputs.traj_index,
        history_length=settings.history_length,
        weight_alpha=settings.alpha,
        mode=settings.mode,
        episode_advantage_w=settings.episode_advantage_w,
        as_published=settings.as_published,
        compute_mean_std_cross_steps=inputs.config.compute_mean_std_cross_steps,
        step_index=inputs.step_index,
    )
