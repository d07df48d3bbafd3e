#!/usr/bin/env bash
# GiGPO on WebShop: Qwen2.5-1.5B-Instruct on two GPUs, or the embedded model on a machine without one.
#
#   bash examples/gigpo_trainer/run_webshop.sh
#   bash examples/gigpo_trainer/run_webshop.sh trainer.total_epochs=3 env.rollout.n=4
#   ENGINE=hf bash examples/gigpo_trainer/run_webshop.sh
#
# Every argument is an override; any key of verl/trainer/config/ppo_trainer.yaml can be given. explain=true prints all
# values with their sources and the numbers that follow, and stops. ENGINE is vllm (default) or hf.
#
# The other recipes start from these values and say what they change: docs/recipes.md.
source "$(dirname "${BASH_SOURCE[0]}")/../webshop.sh"

num_cpus_per_env_worker=0.1
train_data_size=16                         # tasks per training step
val_data_size=128                          # validation environments at a time
group_size=8                               # episodes per task
mode=mean_norm                             # mean_norm | mean_std_norm

# The same on every machine: the algorithm, the penalty, the environment, the bookkeeping.
recipe=(
    algorithm.adv_estimator=gigpo
    algorithm.gamma=0.95
    algorithm.gigpo.step_advantage_w=1.0
    algorithm.gigpo.mode=$mode
    algorithm.use_kl_in_reward=False
    data.filter_overlong_prompts=True
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.01
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.use_invalid_action_penalty=True
    actor_rollout_ref.actor.invalid_action_penalty_coef=0.1
    actor_rollout_ref.rollout.val_kwargs.temperature=0.4
    actor_rollout_ref.rollout.val_kwargs.do_sample=True
    env.env_name=Webshop
    env.seed=0
    env.max_steps=15
    env.resources_per_worker.num_cpus=$num_cpus_per_env_worker
    trainer.critic_warmup=0
    "trainer.logger=[console,wandb]"
    trainer.project_name=verl_agent_webshop
    trainer.nnodes=1
    trainer.val_before_train=True
)

# With GPUs: two, or the one there is.
gpu_val_tasks=256                          # validation tasks
gpu=(
    data.train_batch_size=$train_data_size
    data.val_batch_size=$val_data_size
    data.max_prompt_length=4096
    data.max_response_length=512
    data.truncation=error
    data.return_raw_chat=True
    actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_dynamic_bsz=True           # micro-batches by tokens, of the other models too
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
    actor_rollout_ref.actor.fsdp_config.param_offload=False
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
    actor_rollout_ref.rollout.tensor_model_parallel_size=$ranks
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.enable_chunked_prefill=False
    actor_rollout_ref.rollout.enforce_eager=False
    actor_rollout_ref.rollout.free_cache_engine=False
    actor_rollout_ref.ref.fsdp_config.param_offload=True
    env.rollout.n=$group_size
    trainer.experiment_name=gigpo_qwen2.5_1.5b
    trainer.n_gpus_per_node=$ranks
    trainer.total_epochs=150
    trainer.save_freq=-1
    trainer.test_freq=5
)

# Without one: the sizes of verl/trainer/config/preset/embedded.yaml.
embedded_val_tasks=128
embedded=(
    preset=embedded
    data.train_batch_size=8
    trainer.experiment_name=gigpo_embedded
)

if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then train "$@"; fi
