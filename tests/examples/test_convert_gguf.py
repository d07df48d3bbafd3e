"""GGUF to Hugging Face: names, the order of rotated rows, and a small file there and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from examples.smollm2.convert_gguf import NAMES, convert, halves_from_pairs, hf_name, make_tokenizer
from verl.utils.tokenizer import hf_tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġb", "12"]
FIELDS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
    "tokenizer.ggml.merges": ["Ġ b", "1 2"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}",
    "llama.context_length": 64,
}


def test_names_of_tensors() -> None:
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hf_name("blk.11.attn_output.weight") == "model.layers.11.self_attn.o_proj.weight"
    with pytest.raises(ValueError, match="ffn_gate_exps"):
        hf_name("blk.0.ffn_gate_exps.weight")


def test_rotated_pairs_become_halves() -> None:
    rows = np.array([[10], [11], [12], [13], [20], [21], [22], [23]])  # two heads of two pairs each
    assert halves_from_pairs(rows, heads=2)[:, 0].tolist() == [10, 12, 11, 13, 20, 22, 21, 23]


def test_the_tokenizer_takes_digits_one_by_one_and_knows_its_markers() -> None:
    tokenizer = make_tokenizer(FIELDS)
    ids = tokenizer("a b12<|im_end|>", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "Ġb", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(ids) == "a b12<|im_end|>"
    assert (tokenizer.eos_token, tokenizer.pad_token_id) == ("<|im_end|>", 2)
    with pytest.raises(ValueError, match="llama-bpe"):
        make_tokenizer(FIELDS | {"tokenizer.ggml.pre": "llama-bpe"})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    with pytest.raises(ValueError, match="missing.gguf"):
        convert(tmp_path / "missing.gguf", tmp_path / "out")


def test_a_converted_file_is_the_model_it_was_written_from(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(TOKENS), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, rope_theta=1e4,
        )  # fmt: skip
    ).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()  # what the folder can hold
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_embedding_length(16)
    writer.add_feed_forward_length(24)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(1e4)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types(FIELDS["tokenizer.ggml.token_type"])
    writer.add_token_merges(FIELDS["tokenizer.ggml.merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(FIELDS["tokenizer.chat_template"])
    names = {new: old for old, new in NAMES.items()}
    for name, weight in model.named_parameters():
        values, layer = weight.detach().float().numpy(), ""
        short = name.removesuffix(".weight")
        if short.startswith("model.layers."):
            _, _, number, short = short.split(".", 3)
            layer = f"blk.{number}."
        for part, heads in (("q_proj", 4), ("k_proj", 2)):
            if short.endswith(part):  # halves to pairs
                values = values.reshape(heads, 2, len(values) // heads // 2, 16).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(f"{layer}{names[short]}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    convert(tmp_path / "model.gguf", tmp_path / "folder")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32)
    ids = torch.arange(3, 23)[None]
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=0)
    assert hf_tokenizer(str(tmp_path / "folder"))("a b")["input_ids"] == make_tokenizer(FIELDS)("a b")["input_ids"]
