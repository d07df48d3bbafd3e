#!/usr/bin/env bash
# GiGPO with dynamic sampling on WebShop: a group whose episodes all got the same reward plays another task, up to ten,
# and the clip range is wider above than below (arXiv 2505.10978, 2503.14476).
# Everything else is as in gigpo_trainer/run_webshop.sh.
source "$(dirname "${BASH_SOURCE[0]}")/../gigpo_trainer/run_webshop.sh"

recipe+=(
    algorithm.filter_groups.enable=True
    algorithm.filter_groups.max_num_gen_batches=10
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
)
gpu+=(trainer.experiment_name=gigpo_dynamic_qwen2.5_1.5b)
embedded+=(trainer.experiment_name=gigpo_dynamic_embedded)
train "$@"
