#!/usr/bin/env bash
# PPO on WebShop with LoRA on policy and critic: Qwen2.5-7B-Instruct, adapters of rank 64, no KL loss.
# Everything else is as in run_webshop.sh.
source "$(dirname "${BASH_SOURCE[0]}")/run_webshop.sh"

recipe+=(
    actor_rollout_ref.actor.use_kl_loss=False
)
gpu+=(
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct
    actor_rollout_ref.model.lora_rank=64
    actor_rollout_ref.model.lora_alpha=64
    actor_rollout_ref.actor.optim.lr=3e-6
    critic.model.path=Qwen/Qwen2.5-7B-Instruct
    critic.model.lora_rank=64
    critic.model.lora_alpha=64
    critic.optim.lr=3e-5
    trainer.experiment_name=ppo_qwen2.5_7b_no_kl_lora
)
embedded+=(
    actor_rollout_ref.model.lora_rank=16
    actor_rollout_ref.model.lora_alpha=32
    actor_rollout_ref.actor.optim.lr=1e-3
    critic.model.lora_rank=16
    critic.model.lora_alpha=32
    trainer.experiment_name=ppo_embedded_no_kl_lora
)
train "$@"
