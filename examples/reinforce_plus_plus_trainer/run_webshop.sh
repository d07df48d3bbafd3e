#!/usr/bin/env bash
# REINFORCE++ on WebShop: no groups, the return of each token whitened over the batch, KL in the reward
# (arXiv 2501.03262). The same number of episodes as in groups, each of a task of its own.
# Everything else is as in gigpo_trainer/run_webshop.sh.
source "$(dirname "${BASH_SOURCE[0]}")/../gigpo_trainer/run_webshop.sh"

recipe+=(
    algorithm.adv_estimator=reinforce_plus_plus
    algorithm.gamma=1.0                    # per token
    algorithm.use_kl_in_reward=True
    algorithm.kl_penalty=kl
    algorithm.kl_ctrl.kl_coef=0.01
    actor_rollout_ref.actor.use_kl_loss=False
)
gpu+=(
    data.train_batch_size=128
    env.rollout.n=1
    trainer.experiment_name=reinforce_plus_plus_qwen2.5_1.5b
)
embedded+=(
    data.train_batch_size=64
    env.rollout.n=1
    trainer.experiment_name=reinforce_plus_plus_embedded
)
train "$@"
