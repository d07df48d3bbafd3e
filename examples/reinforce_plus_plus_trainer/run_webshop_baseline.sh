#!/usr/bin/env bash
# REINFORCE++ with a baseline on WebShop: the reward less the mean of its group, whitened over the batch, and the k2
# estimate of KL in the loss (arXiv 2501.03262).
# Everything else is as in gigpo_trainer/run_webshop.sh.
source "$(dirname "${BASH_SOURCE[0]}")/../gigpo_trainer/run_webshop.sh"

recipe+=(
    algorithm.adv_estimator=reinforce_plus_plus_baseline
    algorithm.gamma=1.0
    actor_rollout_ref.actor.kl_loss_type=mse
)
gpu+=(trainer.experiment_name=reinforce_plus_plus_baseline_qwen2.5_1.5b)
embedded+=(trainer.experiment_name=reinforce_plus_plus_baseline_embedded)
train "$@"
