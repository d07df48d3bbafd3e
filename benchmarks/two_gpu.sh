#!/usr/bin/env bash
# Everything that takes two GPUs to see, in one go: the stock recipe with one tensor-parallel engine and with an engine a
# GPU (validation and checkpoint included), the update on two ranks beside plain FSDP2, rollouts both ways, and the GPU
# tests.
#
#   bash benchmarks/two_gpu.sh
#   MODEL=/models/Qwen2.5-1.5B-Instruct OUT=/tmp/two_gpu bash benchmarks/two_gpu.sh
#   STAGES="stock_tp2 stock_dp2" STEPS=5 bash benchmarks/two_gpu.sh trainer.val_before_train=True
#   TINY=1 bash benchmarks/two_gpu.sh          # the same stages on CPU, two ranks, tiny sizes: a rehearsal
#
# MODEL   folder of a model; without it a model of Qwen2.5-1.5B's size that shops is made (benchmarks/widen_model.py)
# OUT     where a log of each stage and summary.md go (default outputs/two_gpu)
# STAGES  which stages, in this order: stock_tp2 stock_dp2 update rollout_tp2 rollout_dp2 tests
# STEPS   training steps of a stock run (default 4; the last one validates and saves)
# GPUS    ranks (default 2); with GPUS=1 stock_tp2 is the recipe on one GPU and the other pairs fall to one
# LIMIT   seconds of a stock run at most (default 600)
# Further arguments are overrides for the stock runs. A stage that fails or runs out of time is said so in the summary
# and the next one starts; the exit code is the number of stages that failed, 64 if an argument above is wrong.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

OUT=${OUT:-outputs/two_gpu}
TINY=${TINY:-}
GPUS=${GPUS:-2}
LIMIT=${LIMIT:-600}
STEPS=${STEPS:-${TINY:+1}}
STEPS=${STEPS:-4}
every_stage="stock_tp2 stock_dp2 update rollout_tp2 rollout_dp2 tests"
STAGES=${STAGES:-$every_stage}
STAGES=${STAGES//[[:space:]]/ }
MODEL=${MODEL:-} makes_model=
refuse() {
    echo "$1" >&2
    exit 64
}
for one in $STAGES; do
    [[ " $every_stage " == *" $one "* ]] || refuse "STAGES: there is no stage $one; use some of $every_stage"
done
[[ $STAGES =~ [^[:space:]] ]] || refuse "STAGES names no stage; use some of $every_stage"
for one in GPUS LIMIT STEPS; do
    [[ ${!one} =~ ^[1-9][0-9]*$ ]] || refuse "$one=${!one} has to be a whole number, at least 1"
done
mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd) || refuse "OUT=$OUT has to be a folder that can be written to"
work=$(mktemp -d "${TMPDIR:-/tmp}/two_gpu.XXXXXX")
trap 'rm -rf "$work"' EXIT
running=
ended() {  # a stage ends with the script: it saves what it has, as far as its limit lets it
    [[ -n "$running" ]] && kill "$running" 2>/dev/null && wait "$running"
    exit "$1"
}
trap 'ended 143' TERM
trap 'ended 130' INT
trap 'ended 129' HUP
python=python3
if [[ -z "${VIRTUAL_ENV:-}" && -x .venv/bin/python ]]; then
    python=.venv/bin/python
fi
export WANDB_MODE=${WANDB_MODE:-offline} PYTHONUNBUFFERED=1
if [[ -n "$TINY" ]]; then
    export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 CUDA_VISIBLE_DEVICES=
fi
: >"$work/stages"

# stage NAME LIMIT_S COMMAND...: runs it if it is wanted, within its limit, with its log in $OUT/NAME.log
failed=0
stage() {
    local name=$1 limit=$2 begin=$SECONDS code=0
    shift 2
    [[ " $STAGES " == *" $name "* ]] || return 0
    echo "== $name (at most $limit s)"
    timeout --kill-after=20 "$limit" "$@" >"$OUT/$name.log" 2>&1 &
    running=$!
    wait "$running" || code=$?
    running=
    local word="exit code $code"
    ((code == 0)) && word=ok
    ((code == 124 || code == 137)) && word="out of time"
    ((code == 0)) || { failed=$((failed + 1)); tail -n 15 "$OUT/$name.log"; }
    echo "| $name | $word | $((SECONDS - begin)) |" | tee -a "$work/stages"
}

stock() {  # NAME TENSOR_PARALLEL OVERRIDE...
    local name=$1 parallel=$2
    shift 2
    "$python" -m examples.data_preprocess.prepare --mode text --local_dir "$work/data" \
        --train_data_size "$tasks" --val_data_size "$val_tasks" || return 1
    bash examples/gigpo_trainer/run_webshop.sh \
        trainer.n_gpus_per_node="$GPUS" actor_rollout_ref.rollout.tensor_model_parallel_size="$parallel" \
        "data.train_files='$work/data/text/train.parquet'" "data.val_files='$work/data/text/test.parquet'" \
        trainer.total_training_steps="$STEPS" trainer.test_freq="$STEPS" trainer.save_freq="$STEPS" \
        trainer.val_before_train=False trainer.default_local_dir="$work/$name" trainer.progress_bar=False \
        trainer.experiment_name="$name" "${sizes[@]}" "$@" || return 1
    local one
    for one in "$@"; do  # whether and where to save is the caller's choice then
        case $one in trainer.save_freq=* | trainer.default_local_dir=*) return 0 ;; esac
    done
    ls -d "$work/$name/global_step_$STEPS" && du -sh "$work/$name/global_step_$STEPS" || return 1
    rm -rf "$work/$name"/global_step_*  # a checkpoint of a real model is large
}

make_model() {
    "$python" -m benchmarks.widen_model "$work/model" --device cuda
}

export -f stock make_model
if [[ -n "$TINY" ]]; then
    tasks=2 val_tasks=2 split=1  # the embedded model cannot be split
    sizes=(
        data.train_batch_size=2 data.val_batch_size=2 env.rollout.n=2 env.max_steps=3
        actor_rollout_ref.actor.ppo_mini_batch_size=8 "trainer.logger=[console]"
    )
    update=(--shape tiny --device cpu --rows 2 --steps 1 --arms plain all fit)
    rollout=(--tiny --device cpu --episodes 8)
    tests=(-m "not gpu" tests/rollout/test_settings.py)
else
    tasks=16 val_tasks=128 split=$GPUS
    if [[ -z "$MODEL" && " $STAGES " == *" stock_"* ]]; then
        MODEL=$work/model
        makes_model=yes
    fi
    sizes=("actor_rollout_ref.model.path='$MODEL'")
    # a rank's part of the recipe, with the memory that the engine leaves it
    update=(
        --arms plain fit-compiled --rows 96 --mini-rows 32 --prompt-tokens 450 900 --response-tokens 5 40 --steps 4
        --reshard-after-forward --keep-gathered --occupied-gib 80 --micro-tokens 16384
    )
    rollout=()
    tests=(-m gpu tests)
fi
stage_stock() {  # NAME TENSOR_PARALLEL LIMIT OVERRIDE...
    local name=$1 parallel=$2 limit=$3
    shift 3
    stage "$name" "$limit" bash -c "$(declare -p python work tasks val_tasks sizes GPUS STEPS); stock \"\$@\"" \
        stock "$name" "$parallel" "$@"
}

if [[ -n "$makes_model" ]]; then
    STAGES="model $STAGES"
    stage model 300 bash -c "$(declare -p python work); make_model"
fi
stage_stock stock_tp2 "$split" "$LIMIT" "$@"
stage_stock stock_dp2 1 "$LIMIT" "$@"
stage update 400 "$python" -m torch.distributed.run --standalone --local-addr 127.0.0.1 \
    --nproc-per-node "$GPUS" \
    -m benchmarks.update_phase "${update[@]}" --out "$work/update.json"
stage rollout_tp2 400 "$python" -m benchmarks.rollout "${rollout[@]}" --replicas 1 --tensor-parallel "$GPUS"
stage rollout_dp2 400 "$python" -m benchmarks.rollout "${rollout[@]}" --replicas "$GPUS"
stage tests 500 "$python" -m pytest -q "${tests[@]}"

{
    echo "# $GPUS ranks"
    echo
    "$python" -c 'import torch, transformers, vllm; print("torch", torch.__version__, "vLLM", vllm.__version__,
        "transformers", transformers.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU")' \
        2>/dev/null | tail -n 1
    echo
    echo "| stage | | seconds |"
    echo "| --- | --- | --- |"
    cat "$work/stages"
    echo
    folders=()
    for name in stock_tp2 stock_dp2; do
        [[ " $STAGES " == *" $name "* ]] && folders+=("$work/$name")
    done
    ((${#folders[@]})) && "$python" -m benchmarks.run_summary "${folders[@]}" 2>&1
    for name in update rollout_tp2 rollout_dp2; do
        [[ -f "$OUT/$name.log" && " $STAGES " == *" $name "* ]] || continue
        echo
        echo "## $name"
        echo
        grep -E '^(\||step: )' "$OUT/$name.log"
    done
    if [[ -f "$OUT/tests.log" && " $STAGES " == *" tests "* ]]; then
        echo
        tail -n 3 "$OUT/tests.log"
    fi
} >"$OUT/summary.md"
cat "$OUT/summary.md"
exit "$failed"
