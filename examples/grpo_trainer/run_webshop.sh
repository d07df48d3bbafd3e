#!/usr/bin/env bash
# GRPO on WebShop: the reward of an episode against its task group, for all steps alike (arXiv 2402.03300).
# Everything else is as in gigpo_trainer/run_webshop.sh.
source "$(dirname "${BASH_SOURCE[0]}")/../gigpo_trainer/run_webshop.sh"

recipe+=(
    algorithm.adv_estimator=grpo
    algorithm.gamma=1.0
)
gpu+=(trainer.experiment_name=grpo_qwen2.5_1.5b)
embedded+=(trainer.experiment_name=grpo_embedded)
if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then train "$@"; fi
