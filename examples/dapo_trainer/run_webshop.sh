#!/usr/bin/env bash
# DAPO on WebShop: GRPO's advantage with a wider clip range above, groups of equal rewards replaced by new tasks, a mean
# over all tokens, a growing fine for the last quarter of the longest response, and no KL (arXiv 2503.14476).
# Everything else is as in gigpo_trainer/run_webshop.sh.
source "$(dirname "${BASH_SOURCE[0]}")/../gigpo_trainer/run_webshop.sh"

recipe+=(
    algorithm.adv_estimator=grpo
    algorithm.gamma=1.0
    algorithm.filter_groups.enable=True
    algorithm.filter_groups.max_num_gen_batches=10
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.loss_agg_mode=token-mean
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.entropy_coeff=0
    reward_model.overlong_buffer.enable=True
    reward_model.overlong_buffer.penalty_factor=1.0
)
gpu+=(
    reward_model.overlong_buffer.len=128
    trainer.experiment_name=dapo_qwen2.5_1.5b
)
embedded+=(
    reward_model.overlong_buffer.len=16
    trainer.experiment_name=dapo_embedded
)
train "$@"
