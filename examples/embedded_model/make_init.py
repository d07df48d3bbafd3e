"""Write the folder that the embedded model's training starts from: config.json and tokenizer, no weights.

    python -m examples.embedded_model.make_init --demonstrations demos.parquet --output init_dir
"""
from __future__ import annotations

import argparse
import logging
from pathlib import Path

from transformers import Qwen2Config

from examples.embedded_model.make_tokenizer import train

HEAD_DIM = 32  # the smallest that vLLM's CPU attention has


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demonstrations", type=Path, required=True, help="parquet with prompt and response columns")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--vocab_size", type=int, default=3072)
    parser.add_argument("--hidden_size", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    tokenizer = train(args.demonstrations, args.vocab_size)
    tokenizer.save_pretrained(args.output)
    Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden_size // HEAD_DIM,
        num_key_value_heads=2,
        intermediate_size=args.hidden_size * 8 // 3,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(args.output)
    logging.info("%s holds config.json and a tokenizer of %d entries", args.output, len(tokenizer))


if __name__ == "__main__":
    main()
