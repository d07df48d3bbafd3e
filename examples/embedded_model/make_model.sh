#!/usr/bin/env bash
# Make the embedded WebShop model: demonstrations of the scripted shopper, tokenizer, four lessons of fine-tuning.
# About five minutes on one GPU (TOKENS=65536), half an hour on two CPU cores. A finished lesson is not repeated.
set -euo pipefail
cd "$(dirname "$0")/../.."

if [[ -z "${PYTHON:-}" ]]; then
    source examples/python.sh
    PYTHON=$python
fi
WORK=${WORK:-outputs/embedded_model}   # everything is written here; the model lands in $WORK/model
EPISODES=${EPISODES:-24000}
TOKENS=${TOKENS:-8192}                 # tokens of one micro-batch; 65536 suits a GPU

# The shopper slips: it buys with options left unchosen, takes a look-alike, overlooks the price, searches lazily.
# A model that imitates it shops well sometimes, and reinforcement learning finds out which habits pay.
SLIPS=(--skill skip_options=0.45 --skill wrong_product=0.3 --skill ignore_price=0.3 --skill lazy_query=0.2)

play() {   # play FILE EPISODES SEED CATALOGUES
    [ -f "$1" ] || "$PYTHON" -m agent_system.environments.env_package.webshop.demonstrations \
        "$1" --episodes "$2" --seed "$3" --catalogues "$4" "${SLIPS[@]}"
}

lesson() { # lesson NAME START STEPS BATCH LR [OVERRIDES...]: train on NAME.parquet from START, write the model to NAME
    "$PYTHON" -m verl.trainer.fsdp_sft_trainer \
        "data.train_files='$WORK/$1.parquet'" "data.val_files='$WORK/held_out.parquet'" \
        data.apply_chat_template=true data.max_length=1536 data.train_batch_size="$4" data.max_token_len_per_gpu="$TOKENS" \
        "model.path='$2'" model.fsdp_config.model_dtype=bf16 \
        optim.lr="$5" optim.warmup_steps_ratio=0.03 \
        trainer.total_training_steps="$3" trainer.total_epochs=1000 trainer.log_freq=50 \
        "trainer.default_local_dir='$WORK/$1'" "trainer.export_dir='$WORK/$1/huggingface'" \
        trainer.export_dtype=float32 \
        "${@:6}"
}

shorter() { # shorter NAME [OPTIONS...]: demonstrations with shorter result pages
    [ -f "$WORK/$1.parquet" ] || "$PYTHON" -m examples.embedded_model.curriculum \
        "$WORK/demos.parquet" "$WORK/$1.parquet" "${@:2}"
}

mkdir -p "$WORK"
play "$WORK/demos.parquet" "$EPISODES" 1 40
play "$WORK/words.parquet" 2000 3 8
play "$WORK/held_out.parquet" 60 2 2
[ -f "$WORK/init/config.json" ] || "$PYTHON" -m examples.embedded_model.make_init \
    --demonstrations "$WORK/words.parquet" --output "$WORK/init"

# 1. The language of the shop: every token is learnt, pages show one or two products.
shorter language --products 1 2
lesson language "$WORK/init" 1400 16 2e-3 data.loss_on_prompt=true optim.lr_scheduler=constant
# 2. Copying: only steps that click a product, and a page with that product alone.
shorter copying --products 1 --others 0
lesson copying "$WORK/language/huggingface" 250 32 1.5e-3
# 3. Copying from a page of a few: which product is meant is seen only there.
shorter few --products 1 2 3 4 --others 0.1
lesson few "$WORK/copying/huggingface" 600 32 2e-3 optim.lr_scheduler=constant
# 4. Choosing: pages of every length up to the real ten, all sorts of steps. Stopped early: there is much left to learn.
shorter choosing --products 1 2 3 4 5 6 8 10 --others 0.35
lesson choosing "$WORK/few/huggingface" "${STEPS:-1300}" 32 2e-3

rm -rf "$WORK/model"
cp -r "$WORK/choosing/huggingface" "$WORK/model"
echo "the model is in $WORK/model"
