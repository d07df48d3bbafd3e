#!/usr/bin/env bash
# One run of SmolLM2-135M on the embedded WebShop on one GPU. Started again, it goes on at its last checkpoint.
#
#   ALGO=gigpo SEED=0 bash examples/smollm2/learn.sh [OVERRIDES]
#   ALGO=grpo  SEED=0 bash examples/smollm2/learn.sh [OVERRIDES]
#
# The two differ in the estimator alone: both subtract the mean of a task's episodes and divide by nothing; GiGPO adds
# the advantage within groups of steps that saw the same page. Several runs may go side by side, on one GPU or, each
# with its CUDA_VISIBLE_DEVICES, on several: each has its Ray, its ports, its caches and its temporary folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if [[ -z "${PYTHON:-}" ]]; then
    source examples/python.sh
    PYTHON=$python
fi
ALGO=${ALGO:-gigpo}
SEED=${SEED:-0}
STEPS=${STEPS:-40}
WORK=${WORK:-outputs/smollm2}
MODEL=${MODEL:-$WORK/start}                # from make_start.sh
RUN=$WORK/${ALGO}_seed$SEED                # checkpoints, metrics.jsonl, validation/
CPUS=${CPUS:-16}                           # for Ray
short=/tmp/smol_${UID}_$(cksum <<<"$PWD $RUN" | cut -d' ' -f1)  # Ray's sockets lie below: their paths must be short
CACHE=${CACHE:-$short/compile}             # its own, as runs that start together write the same files; share a warm one

refuse() {
    echo "learn.sh: $1" >&2
    exit 2
}
case $ALGO in
    gigpo) estimator=(algorithm.adv_estimator=gigpo algorithm.gigpo.mode=mean_norm) ;;
    grpo) estimator=(algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False) ;;
    *) refuse "ALGO=$ALGO has to be gigpo or grpo" ;;
esac

[[ $SEED =~ ^(0|[1-9][0-9]*)$ ]] || refuse "SEED=$SEED has to be a whole number, at least 0"
for one in STEPS CPUS; do
    [[ ${!one} =~ ^[1-9][0-9]*$ ]] || refuse "$one=${!one} has to be a whole number, at least 1"
done

mkdir -p "$RUN" "$short"
unset RAY_ADDRESS
export TMPDIR=$short RAY_TMPDIR=$short
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
export RAY_memory_monitor_refresh_ms=0     # virtual machines that grow with use report too little memory

"$PYTHON" -m examples.data_preprocess.prepare --mode text --local_dir "$RUN/data" \
    --train_data_size 16 --val_data_size 256

exec "$PYTHON" -m verl.trainer.main_ppo \
    "${estimator[@]}" \
    algorithm.gamma=0.95 \
    algorithm.use_kl_in_reward=False \
    "data.train_files='$RUN/data/text/train.parquet'" \
    "data.val_files='$RUN/data/text/test.parquet'" \
    data.train_batch_size=16 \
    data.val_batch_size=256 \
    data.max_prompt_length=2560 \
    data.max_response_length=96 \
    data.truncation=shorten_history \
    data.dataloader_num_workers=0 \
    data.seed="$((SEED + 1))" \
    "actor_rollout_ref.model.path='$MODEL'" \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=2e-5 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=65536 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.01 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.entropy_coeff=0.0 \
    actor_rollout_ref.actor.use_torch_compile=False \
    actor_rollout_ref.actor.use_invalid_action_penalty=True \
    actor_rollout_ref.actor.invalid_action_penalty_coef=0.1 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.seed="$SEED" \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.max_num_seqs=256 \
    actor_rollout_ref.rollout.max_num_batched_tokens=16384 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.2 \
    actor_rollout_ref.rollout.kv_cache_memory_mb=10240 \
    actor_rollout_ref.rollout.enforce_eager=False \
    actor_rollout_ref.rollout.free_cache_engine=False \
    actor_rollout_ref.rollout.val_kwargs.temperature=0.4 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    env.env_name=Webshop \
    env.seed="$SEED" \
    env.max_steps=15 \
    env.rollout.n=8 \
    ray_init.num_cpus="$CPUS" \
    "trainer.logger=[console]" \
    trainer.project_name=smollm2_webshop \
    trainer.experiment_name="${ALGO}_seed$SEED" \
    "trainer.default_local_dir='$RUN'" \
    "trainer.compile_cache_dir='$CACHE'" \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=1 \
    trainer.total_training_steps="$STEPS" \
    trainer.total_epochs="$STEPS" \
    trainer.val_before_train=True \
    trainer.test_freq=10 \
    trainer.save_freq=10 \
    trainer.max_actor_ckpt_to_keep=1 \
    trainer.progress_bar=False \
    "$@"
