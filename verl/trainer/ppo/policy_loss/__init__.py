"""Policy losses, one a file, found by name through the registry."""

from verl.trainer.ppo.policy_loss.cispo import cispo_policy_loss
from verl.trainer.ppo.policy_loss.covariance import clip_cov_policy_loss, kl_cov_policy_loss
from verl.trainer.ppo.policy_loss.gpg import gpg_policy_loss
from verl.trainer.ppo.policy_loss.gspo import gspo_policy_loss, gspo_terms
from verl.trainer.ppo.policy_loss.registry import (
    PolicyLossConfig,
    PolicyLossFn,
    check_policy_loss_output,
    get_policy_loss_fn,
    policy_loss_names,
    register_policy_loss,
)
from verl.trainer.ppo.policy_loss.truncated_is import apply_truncated_importance_sampling
from verl.trainer.ppo.policy_loss.vanilla import dual_clip_terms, vanilla_policy_loss

__all__ = [
    "PolicyLossConfig",
    "PolicyLossFn",
    "apply_truncated_importance_sampling",
    "check_policy_loss_output",
    "cispo_policy_loss",
    "clip_cov_policy_loss",
    "dual_clip_terms",
    "get_policy_loss_fn",
    "gpg_policy_loss",
    "gspo_policy_loss",
    "gspo_terms",
    "kl_cov_policy_loss",
    "policy_loss_names",
    "register_policy_loss",
    "vanilla_policy_loss",
]
