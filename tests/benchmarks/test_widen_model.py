"""A widened model computes what the small one computes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.widen_model import compare, main, save, widen
from benchmarks.widening import UNUSED_MARGIN, WideShape, check_shapes

WIDE = WideShape(hidden=512, layers=5, heads=8, kv_heads=2, intermediate=300, vocabulary=211, positions=256)


def small_model(heads: int = 4, kv_heads: int = 2, epsilon: float = 1e-6, theta: float = 1e4) -> Qwen2ForCausalLM:
    """Random weights with biases and norms away from their first values, so that a misplaced one shows."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=97,
        hidden_size=heads * 32,
        intermediate_size=75,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=128,
        rms_norm_eps=epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(*((1.0, 0.3) if "norm" in name else (0.0, 0.12)))
    return model


def prompts(count: int = 3) -> list[torch.Tensor]:
    return [torch.randint(3, 97, (20 + 9 * i,), generator=torch.Generator().manual_seed(i)) for i in range(count)]


@pytest.mark.parametrize(
    ("small", "wide"),
    [
        ({}, {}),  # heads of 32 in heads of 64, the same key-value heads
        ({"epsilon": 1e-2, "theta": 1e6}, {}),  # an epsilon that decides the result
        ({"heads": 3, "kv_heads": 1}, {"heads": 4, "kv_heads": 1}),  # heads of 128
        ({"heads": 4, "kv_heads": 2}, {"heads": 16, "kv_heads": 4}),  # more key-value heads, heads of the same size
    ],
)
def test_log_probs_and_greedy_texts_stay(small, wide):
    model = small_model(**small)
    shape = dataclasses.replace(WIDE, **wide)
    result = widen(model, shape, prompts())
    assert sum(p.numel() for p in result.parameters()) > 10 * sum(p.numel() for p in model.parameters())
    agreement = compare(model, result, prompts(), tokens=12)
    assert agreement.largest < 1e-4
    assert agreement.same_texts == agreement.texts == 3
    assert agreement.margin > UNUSED_MARGIN - 0.01


def test_new_parts_are_computed_with_real_numbers():
    """Every new row has weights, and in the new layers queries, keys and gates come out as numbers, not as zeros."""
    result = widen(small_model(), WIDE, prompts())
    seen = {}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj"):
        part = result.model.layers[4].get_submodule(name)
        part.register_forward_hook(lambda _, __, output, name=name: seen.update({name: output}))
    result(prompts()[0][None])
    assert len(seen) == 3 and all(output.ne(0).all() for output in seen.values())
    for layer in result.model.layers:
        for part in (*(getattr(layer.self_attn, f"{name}_proj") for name in "qkv"), layer.mlp.gate_proj):
            assert part.weight.abs().sum(1).gt(0).all()
        assert layer.mlp.up_proj.weight.abs().sum(1).gt(0).all()
    assert result.model.layers[4].self_attn.o_proj.weight.abs().sum() == 0


def test_rows_without_a_token_stay_unlikely_after_one_was_read():
    model = small_model()
    result = widen(model, WIDE, prompts())
    prompt = prompts()[1].clone()
    prompt[[3, 12, -1]] = torch.tensor([97, 150, 210])
    with torch.no_grad():
        logits = result(prompt[None]).logits[0]
    assert (logits[:, :97].amax(-1) - logits[:, 97:].amax(-1)).min() > UNUSED_MARGIN / 2
    assert logits.max() < 1e3


def _train(model: Qwen2ForCausalLM, steps: int, rate: float) -> tuple[torch.Tensor, float]:
    """Log-probabilities over the small vocabulary after AdamW steps, and the last gradient's norm."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    for step in range(steps):
        prompt = prompts()[step % 3]
        logits = model(prompt[None]).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits, prompt[1:]).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return model(prompts()[0][None]).logits[0, :, :97].log_softmax(-1), norm


def test_the_wide_model_learns_what_the_small_one_learns():
    """Adam moves a weight by the learning rate whatever its gradient's size: new weights must have none."""
    model = small_model()
    result = widen(model, WIDE, prompts())
    before = {name: value.detach().clone() for name, value in result.named_parameters()}
    with torch.no_grad():
        start = model(prompts()[0][None]).logits[0].log_softmax(-1)
    (ours, norm), (theirs, wide_norm) = (_train(each, steps=12, rate=1e-4) for each in (model, result))
    learned = (ours - start).abs().mean()
    assert learned > 0.05
    assert (theirs - ours).abs().mean() < 0.2 * learned
    assert norm / 2 < wide_norm < 3 * norm
    for name, value in result.named_parameters():
        if "layers.4." in name and "norm" not in name:  # a new layer; weight decay alone moves it
            assert torch.allclose(value, before[name], rtol=1e-4, atol=0.0), name
    assert result.model.embed_tokens.weight[:, 129:].abs().max() == 0
    agreement = compare(model, result, prompts(), tokens=0)
    assert agreement.margin > UNUSED_MARGIN * 0.7


def test_the_written_folder_is_the_model_with_its_tokenizer(tmp_path):
    model = small_model()
    folder = tmp_path / "small"
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    save(widen(model, WIDE, prompts()).to(torch.bfloat16), folder, tmp_path / "wide")
    again = Qwen2ForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.float32)
    assert (tmp_path / "wide" / "tokenizer.json").read_text() == "{}"
    assert again.config.hidden_size == 512 and again.config.rope_parameters["rope_theta"] == 1e4
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert compare(model, again, prompts(), tokens=0).mean < 0.1  # weights rounded to bfloat16
    assert {path.name for path in tmp_path.iterdir()} == {"small", "wide"}


@pytest.mark.parametrize(
    ("small", "wide", "said"),
    [
        ({}, {"hidden": 128}, "--hidden 128"),
        ({}, {"layers": 1}, "--layers 1"),
        ({}, {"kv_heads": 1}, "--kv_heads 1"),
        ({}, {"heads": 2}, "--heads 4 or more"),
        ({}, {"vocabulary": 90}, "--vocabulary 90"),
        ({}, {"positions": 64}, "--positions 64"),
        ({}, {"hidden": 520}, "heads of 65"),
        ({}, {"heads": 7}, "a multiple of"),
        ({"kv_heads": 4}, {}, "--kv_heads 2"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_with_the_flag_to_change(small, wide, said):
    with pytest.raises(ValueError, match=said):
        check_shapes(small_model(**small).config, dataclasses.replace(WIDE, **wide))


def test_other_models_are_refused():
    config = small_model().config
    config.tie_word_embeddings = False
    with pytest.raises(ValueError, match="tied embeddings"):
        check_shapes(config, WIDE)


def test_a_row_of_zeros_is_refused():
    model = small_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = 0.0
    with pytest.raises(ValueError, match="--small: a row"):
        widen(model, WIDE, prompts())


def test_an_existing_folder_is_not_overwritten(tmp_path):
    with pytest.raises(ValueError, match="exists already"):
        main([str(tmp_path)])
