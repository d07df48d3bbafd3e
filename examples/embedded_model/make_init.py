"""Write the folder that the embedded model's training starts from: config.json, tokenizer and random weights.

The embedding rows of a word with and without a blank before it start equal but for one common offset.

    python -m examples.embedded_model.make_init --demonstrations demos.parquet --output init_dir
"""
from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from examples.embedded_model.make_tokenizer import train
from verl.utils.fs import open_to_readers

HEAD_DIM = 32  # the smallest that vLLM's CPU attention has


def tie_blank_forms(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> int:
    """Give every "Ġword" the row of "word" plus one offset that all share; returns the number of pairs."""
    vocabulary = tokenizer.get_vocab()
    blank_forms = {token: row for token, row in vocabulary.items() if token[0] == "Ġ" and token[1:] in vocabulary}
    pairs = [(vocabulary[token[1:]], row) for token, row in blank_forms.items()]
    rows = model.get_input_embeddings().weight
    with torch.no_grad():
        offset = torch.randn(rows.shape[1]) * rows.std()
        for bare, blank in pairs:
            rows[blank] = rows[bare] + offset
    return len(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demonstrations", type=Path, required=True, help="parquet with prompt and response columns")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--vocab_size", type=int, default=3072)
    parser.add_argument("--hidden_size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    tokenizer = train(args.demonstrations, args.vocab_size)
    tokenizer.save_pretrained(args.output)
    config = Qwen2Config(
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
    )
    torch.manual_seed(args.seed)
    model = Qwen2ForCausalLM(config)
    pairs = tie_blank_forms(model, tokenizer)
    model.save_pretrained(args.output)
    open_to_readers(args.output)
    logging.info("%d words start equal with and without a blank", pairs)
    logging.info("%s holds config.json and a tokenizer of %d entries", args.output, len(tokenizer))


if __name__ == "__main__":
    main()
