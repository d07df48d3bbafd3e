#!/usr/bin/env bash
# GiGPO on WebShop with Qwen3-1.7B, no KL loss. Everything else is as in run_webshop.sh.
#
# Qwen3 thinks before it answers, in the <think> tags that the shop's prompt asks for, so its template's thinking mode
# stays on: with it off the template writes an empty thought itself, and a response counts as malformed unless the model
# thinks a second time. A thought that does not end within data.max_response_length is malformed too.
source "$(dirname "${BASH_SOURCE[0]}")/run_webshop.sh"

recipe+=(
    +data.apply_chat_template_kwargs.enable_thinking=True
    actor_rollout_ref.actor.use_kl_loss=False
)
gpu+=(
    actor_rollout_ref.model.path=Qwen/Qwen3-1.7B
    trainer.experiment_name=gigpo_qwen3_1.7b_no_kl
)
embedded+=(
    trainer.experiment_name=gigpo_embedded_no_kl
)
train "$@"
