"""Rotation in the order of memory: the same numbers, for the families of models that rotate by halves."""

from __future__ import annotations

import importlib

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from verl.models import rotary
from verl.models.rotary import rotate_in_memory_order, use_memory_order


def _inputs(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, 9, heads, 16, generator=generator).to(dtype).transpose(1, 2) for heads in (4, 2))
    angles = torch.randn(2, 9, 8, generator=generator).repeat(1, 1, 2)
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_turn_pairs_of_halves(dtype: torch.dtype) -> None:
    q, k, cos, sin = _inputs(dtype)
    for given, got in zip((q, k), rotate_in_memory_order(q, k, cos, sin)):
        pairs = torch.complex(given[..., :8].double(), given[..., 8:].double())
        turned = pairs * torch.complex(cos[..., :8].double(), sin[..., :8].double())[:, None]
        expected = torch.cat((turned.real, turned.imag), dim=-1)
        torch.testing.assert_close(got.double(), expected, atol=1e-6 if dtype == torch.float32 else 0.05, rtol=0)
        assert got.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_numbers_are_those_of_transformers(family: str, dtype: torch.dtype) -> None:
    module = importlib.reload(importlib.import_module(f"transformers.models.{family}.modeling_{family}"))
    inputs = [x.requires_grad_() for x in _inputs(dtype)]
    gradients = []
    for rotate in (module.apply_rotary_pos_emb, rotate_in_memory_order):
        outputs = rotate(*inputs)
        gradients.append(torch.autograd.grad([x.float().square().sum() for x in outputs], inputs[:2]))
        if rotate is not rotate_in_memory_order:
            expected = outputs
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(outputs, expected))
    for theirs, ours in zip(*gradients):
        torch.testing.assert_close(ours, theirs, atol=1e-5 if dtype == torch.float32 else 0.1, rtol=0.02)


def _tiny(family: str, **sizes: int) -> torch.nn.Module:
    config = AutoConfig.for_model(
        family, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=50, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_model_rotates_in_memory_order_and_gives_the_same_logits(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.reload(importlib.import_module(f"transformers.models.{family}.modeling_{family}"))
    model = _tiny(family)
    module = importlib.import_module(type(model).__module__)
    tokens = torch.arange(12).view(1, 12)
    before = model(tokens).logits
    monkeypatch.setattr(module, "apply_rotary_pos_emb", module.apply_rotary_pos_emb)  # put back afterwards
    calls = []
    monkeypatch.setattr(rotary, "rotate_in_memory_order", lambda *a: calls.append(1) or rotate_in_memory_order(*a))
    assert use_memory_order(model)
    assert torch.equal(model(tokens).logits, before) and calls
    assert use_memory_order(model)


def test_a_model_that_rotates_otherwise_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _tiny("qwen2")
    module = importlib.import_module(type(model).__module__)

    def interleaved(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.flip(-1) * cos.unsqueeze(1) + x * sin.unsqueeze(1) for x in (q, k))

    for other in (interleaved, lambda q, k, freqs: (q, k)):
        monkeypatch.setattr(module, "apply_rotary_pos_emb", other)
        assert not use_memory_order(model)
        assert module.apply_rotary_pos_emb is other
    monkeypatch.delattr(module, "apply_rotary_pos_emb")
    assert not use_memory_order(model)
