#!/usr/bin/env bash
# A model behind an OpenAI-compatible endpoint plays WebShop's validation tasks; nothing is trained.
#
#   OPENAI_BASE_URL=https://… OPENAI_MODEL=… OPENAI_API_KEY=… bash examples/prompt_agent/run_webshop.sh
#   bash examples/prompt_agent/run_webshop.sh --episodes 500 env.webshop.data_dir=FOLDER
#
# Options and overrides are those of examples/prompt_agent/evaluate.py (--help).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/python.sh

exec "$python" -m examples.prompt_agent.evaluate --episodes 128 \
    env.env_name=Webshop \
    env.max_steps=15 \
    data.max_response_length=512 \
    actor_rollout_ref.rollout.val_kwargs.temperature=0.4 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    "$@"
