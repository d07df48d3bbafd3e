#!/usr/bin/env bash
# RLOO on WebShop: the reward of an episode less the mean of the others of its group (arXiv 2402.14740).
# Everything else is as in gigpo_trainer/run_webshop.sh.
source "$(dirname "${BASH_SOURCE[0]}")/../gigpo_trainer/run_webshop.sh"

recipe+=(
    algorithm.adv_estimator=rloo
    algorithm.gamma=1.0
)
gpu+=(trainer.experiment_name=rloo_qwen2.5_1.5b)
embedded+=(trainer.experiment_name=rloo_embedded)
train "$@"
