#!/usr/bin/env bash
# Make the embedded WebShop model: demonstrations of the scripted shopper, tokenizer, supervised fine-tuning.
# Minutes on one GPU; arguments are passed on to the trainer as overrides:
#   bash examples/embedded_model/make_model.sh trainer.total_training_steps=2000
set -euo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
WORK=${WORK:-outputs/embedded_model}   # everything is written here; the model lands in $WORK/model
EPISODES=${EPISODES:-120000}
STEPS=${STEPS:-4000}
HIDDEN=${HIDDEN:-192}
LAYERS=${LAYERS:-4}

# The shopper slips: it buys with options left unchosen, takes a look-alike, overlooks the price, searches lazily.
# A model that imitates it shops well sometimes, and reinforcement learning finds out which habits pay.
SLIPS=(--skill skip_options=0.45 --skill wrong_product=0.3 --skill ignore_price=0.3 --skill lazy_query=0.2)

mkdir -p "$WORK"
[ -f "$WORK/demos.parquet" ] || $PYTHON -m agent_system.environments.env_package.webshop.demonstrations \
    "$WORK/demos.parquet" --episodes "$EPISODES" --catalogues 40 "${SLIPS[@]}"
[ -f "$WORK/held_out.parquet" ] || $PYTHON -m agent_system.environments.env_package.webshop.demonstrations \
    "$WORK/held_out.parquet" --episodes 2000 --catalogues 8 --seed 1 "${SLIPS[@]}"

$PYTHON -m examples.embedded_model.make_init --demonstrations "$WORK/held_out.parquet" --output "$WORK/init" \
    --hidden_size "$HIDDEN" --layers "$LAYERS"

$PYTHON -m verl.trainer.fsdp_sft_trainer \
    data.train_files="$WORK/demos.parquet" \
    data.val_files="$WORK/held_out.parquet" \
    data.apply_chat_template=true \
    data.max_length=1536 \
    data.train_batch_size=128 \
    data.max_token_len_per_gpu=65536 \
    model.path="$WORK/init" \
    optim.lr=2e-3 \
    optim.warmup_steps_ratio=0.05 \
    trainer.total_training_steps="$STEPS" \
    trainer.total_epochs=100 \
    trainer.log_freq=50 \
    trainer.default_local_dir="$WORK/sft" \
    trainer.export_dir="$WORK/model" \
    trainer.export_dtype=float32 \
    "$@"
