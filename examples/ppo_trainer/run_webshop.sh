#!/usr/bin/env bash
# PPO on WebShop: generalised advantage estimation with a critic that starts from the policy's model
# (arXiv 1707.06347, 1506.02438). No groups: the same number of episodes, each of a task of its own.
# Everything else is as in gigpo_trainer/run_webshop.sh.
source "$(dirname "${BASH_SOURCE[0]}")/../gigpo_trainer/run_webshop.sh"

recipe+=(
    algorithm.adv_estimator=gae
    algorithm.gamma=1.0                    # per token
    algorithm.lam=1.0
)
gpu+=(
    data.train_batch_size=128
    env.rollout.n=1
    critic.model.path=Qwen/Qwen2.5-1.5B-Instruct
    critic.model.use_remove_padding=True
    critic.model.enable_gradient_checkpointing=True
    critic.model.fsdp_config.param_offload=False
    critic.model.fsdp_config.optimizer_offload=False
    critic.optim.lr=1e-5
    critic.ppo_max_token_len_per_gpu=16384
    trainer.experiment_name=ppo_qwen2.5_1.5b
)
embedded+=(
    data.train_batch_size=64
    env.rollout.n=1
    trainer.experiment_name=ppo_embedded
)
if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then train "$@"; fi
