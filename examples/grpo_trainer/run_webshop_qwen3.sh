#!/usr/bin/env bash
# GRPO on WebShop with Qwen3-1.7B, no KL loss; why thinking stays on: gigpo_trainer/run_webshop_qwen3.sh.
# Everything else is as in run_webshop.sh.
source "$(dirname "${BASH_SOURCE[0]}")/run_webshop.sh"

recipe+=(
    +data.apply_chat_template_kwargs.enable_thinking=True
    actor_rollout_ref.actor.use_kl_loss=False
)
gpu+=(
    actor_rollout_ref.model.path=Qwen/Qwen3-1.7B
    trainer.experiment_name=grpo_qwen3_1.7b_no_kl
)
embedded+=(
    trainer.experiment_name=grpo_embedded_no_kl
)
train "$@"
