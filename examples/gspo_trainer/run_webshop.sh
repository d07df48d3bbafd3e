#!/usr/bin/env bash
# GSPO on WebShop: GRPO's advantage with the probability ratio of a whole response, so that the clip range is small and
# every response counts alike (arXiv 2507.18071).
# Everything else is as in gigpo_trainer/run_webshop.sh.
source "$(dirname "${BASH_SOURCE[0]}")/../gigpo_trainer/run_webshop.sh"

recipe+=(
    algorithm.adv_estimator=grpo
    algorithm.gamma=1.0
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo
    actor_rollout_ref.actor.clip_ratio_low=0.0003
    actor_rollout_ref.actor.clip_ratio_high=0.0004
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
)
gpu+=(trainer.experiment_name=gspo_qwen2.5_1.5b)
embedded+=(trainer.experiment_name=gspo_embedded)
train "$@"
