# What the WebShop recipes share beside values. They source this file; it does not run by itself.
#
# A recipe fills three arrays of overrides and calls `train "$@"`:
#   recipe     for every machine
#   gpu        for a machine with GPUs, $ranks of which are used
#   embedded   for a machine without one
# Later wins: `recipe`, then `gpu` or `embedded`, then the arguments of the command line.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# GPUs of this machine, cut down by CUDA_VISIBLE_DEVICES.
gpus=$( (nvidia-smi -L 2>/dev/null || true) | grep -c GPU || true)
if [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then
    chosen=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -cvE '^ *(-1)? *$' || true)
    gpus=$((chosen < gpus ? chosen : gpus))
fi
ranks=$((gpus < 2 ? gpus : 2))
data_dir=$HOME/data/verl-agent

# train [vllm|hf] OVERRIDE...: writes the parquet files, in a folder for each number of tasks, and becomes the training
# process. Where it only informs (explain=true, --cfg job, --help), or the configuration is refused, nothing is written.
train() {
    local engine=${ENGINE:-vllm}
    if [[ "${1:-}" == vllm || "${1:-}" == hf ]]; then
        engine=$1
        shift
    fi
    cd "$repository"
    source examples/python.sh
    ulimit -u 65536 2>/dev/null || true    # Ray starts many processes

    local script val_tasks
    script=$(basename "$0")
    local overrides=("actor_rollout_ref.rollout.name=$engine" "${recipe[@]}")
    if ((gpus > 0)); then
        if ((gpus == 1)); then
            echo "$script: one GPU found, running on one instead of two."
        fi
        overrides+=("${gpu[@]}")
        val_tasks=$gpu_val_tasks
    else
        echo "$script: no GPU found, running the embedded model on the CPU (preset=embedded)."
        export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
        overrides+=("${embedded[@]}")
        val_tasks=$embedded_val_tasks
    fi

    # One parquet row a task, so that an epoch is one training step whatever data.train_batch_size is.
    # An override may begin with one or two plus signs, and may be a mapping: 'data={train_batch_size: 4}'.
    local override train_tasks= explains= informs=
    local number='[ "'\'']*\+?([1-9][0-9_]{0,7})(\.0*)?[ "'\'']*'
    local of_key="^\+{0,2}data\.train_batch_size=$number$"
    local of_mapping="^\+{0,2}data=\{(.*[ ,])?train_batch_size *:$number[,}]"
    for override in "${overrides[@]}" "$@"; do
        if [[ "$override" =~ $of_key ]]; then
            train_tasks=${BASH_REMATCH[1]//_/}
        elif [[ "$override" =~ $of_mapping ]]; then
            train_tasks=${BASH_REMATCH[2]//_/}
        elif [[ "${override,,}" =~ ^\+{0,2}explain=\ *(true|false)\ *$ ]]; then
            explains=${BASH_REMATCH[1]}
        elif [[ "$override" =~ ^(--cfg|-c|--info|-i|--help|-h|--hydra-help)(=|$) ]]; then
            informs=yes
        fi
    done
    local folder=$data_dir/tasks_${train_tasks}_$val_tasks
    overrides+=("data.train_files='$folder/text/train.parquet'" "data.val_files='$folder/text/test.parquet'" "$@")
    if [[ -z "$informs" && "$explains" != true ]]; then
        if [[ ! -f $folder/text/train.parquet || ! -f $folder/text/test.parquet ]]; then    # else nothing is written
            local refusal
            refusal=$("$python" -m verl.trainer.main_ppo "${overrides[@]}" explain=true 2>&1 >/dev/null) || {
                local code=$?
                echo "$refusal" >&2
                exit "$code"
            }
        fi
        "$python" -m examples.data_preprocess.prepare --mode text --local_dir "$folder" \
            --train_data_size "$train_tasks" --val_data_size "$val_tasks"
    fi

    exec "$python" -m verl.trainer.main_ppo "${overrides[@]}"
}
