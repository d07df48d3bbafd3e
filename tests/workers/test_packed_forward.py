"""Packed rows give what a plain transformers forward gives for each row alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.workers.tiny import CONFIGS, VOCABULARY, save_tiny_model, tiny_config
from verl.models import logprobs
from verl.models.attention import packed_attention, register_packed_attention
from verl.models.build import ModelSpec, build_model, has_weights
from verl.models.heads import forward_log_probs, forward_values
from verl.models.packing import pack_rows
from verl.utils.checkpoint.hf_export import full_parameters
from verl.utils.fsdp_utils import ShardingOptions, create_device_mesh, ensure_process_group


@pytest.fixture(scope="module", autouse=True)
def _group() -> None:
    ensure_process_group("cpu")


def _rows(seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    draw = lambda sizes: [rng.integers(2, VOCABULARY, n) for n in sizes]  # noqa: E731
    return draw((5, 9, 1, 3)), draw((4, 1, 0, 7))


def _plain(model: torch.nn.Module, prompts: list, responses: list, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies row by row, from full logits."""
    log_probs, entropies = [], []
    for prompt, response in zip(prompts, responses):
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        table = F.log_softmax(model(ids).logits[0].float() / temperature, dim=-1)[len(prompt) - 1 : -1]
        table = table[: len(response)]
        log_probs.append(table.gather(1, torch.from_numpy(response)[:, None])[:, 0])
        entropies.append(-(table.exp() * table).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


def _build(path: str, **changes: object) -> torch.nn.Module:
    return build_model(ModelSpec(path, **changes), create_device_mesh(1, -1, "cpu"), ShardingOptions())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_log_probs_entropies_and_gradients_equal_the_plain_forward(
    tmp_path: Path, family: str, checkpointing: bool
) -> None:
    path = save_tiny_model(tmp_path, family)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    packed_model = _build(path, gradient_checkpointing=checkpointing)
    prompts, responses = _rows()
    expected = _plain(plain, prompts, responses, temperature=0.7)
    got = forward_log_probs(packed_model, pack_rows(prompts, responses), temperature=0.7)
    for ours, theirs in zip(got, expected):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)

    weights = torch.randn(2, len(expected[0]), generator=torch.Generator().manual_seed(0))
    (expected[0] * weights[0] + expected[1] * weights[1]).sum().backward()
    (got[0] * weights[0] + got[1] * weights[1]).sum().backward()
    reference = {name: param.grad for name, param in plain.named_parameters()}
    for name, param in packed_model.named_parameters():
        torch.testing.assert_close(param.grad.full_tensor(), reference[name], atol=2e-4, rtol=1e-4)


def test_a_sliding_window_looks_no_further_back_than_transformers_does() -> None:
    config = tiny_config("qwen2")
    config.use_sliding_window, config.sliding_window, config.max_window_layers = True, 4, 0
    config.layer_types = ["sliding_attention"] * 2
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    packed = AutoModelForCausalLM.from_config(config, attn_implementation=register_packed_attention()).eval()
    packed.load_state_dict(plain.state_dict())
    ids = torch.randint(2, VOCABULARY, (1, 12))
    torch.testing.assert_close(packed(ids).logits, plain(ids).logits, atol=1e-4, rtol=1e-4)


def test_rows_do_not_see_each_other(tmp_path: Path) -> None:
    model = _build(save_tiny_model(tmp_path))
    prompts, responses = _rows()
    alone, _ = forward_log_probs(model, pack_rows(prompts[3:], responses[3:]), 1.0)
    other_prompts, other_responses = _rows(seed=5)
    mixed, _ = forward_log_probs(
        model, pack_rows(other_prompts[:2] + prompts[3:], other_responses[:2] + responses[3:]), 1.0
    )
    torch.testing.assert_close(mixed[-len(alone) :], alone, atol=1e-5, rtol=1e-5)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 50, (300,), generator=generator)
    results = []
    for elements in (1 << 22, 50 * 64):
        monkeypatch.setitem(logprobs._CHUNK_ELEMENTS, "cpu", elements)
        hidden = torch.randn(300, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
        weight = torch.randn(50, 16, generator=torch.Generator().manual_seed(2), requires_grad=True)
        log_probs, entropy = logprobs.token_log_probs(hidden, weight, labels, temperature=1.3)
        (log_probs.sum() - 0.3 * entropy.square().sum()).backward()
        results.append((log_probs, entropy, hidden.grad, weight.grad))
    for whole, chunked in zip(*results):
        torch.testing.assert_close(chunked, whole, atol=1e-4, rtol=1e-5)


def test_chunked_gradients_pass_gradcheck() -> None:
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 6, 3, 3, 1])
    log_probs, entropy = logprobs.token_log_probs(hidden, weight, labels, temperature=0.5)
    table = F.log_softmax((hidden @ weight.t()) / 0.5, dim=-1)
    torch.testing.assert_close(log_probs.double(), table[torch.arange(5), labels], atol=1e-5, rtol=1e-5)
    ours = torch.autograd.grad((log_probs * 2 - entropy).sum(), (hidden, weight))
    plain_entropy = -(table.exp() * table).sum(-1)
    theirs = torch.autograd.grad((table[torch.arange(5), labels] * 2 - plain_entropy).sum(), (hidden, weight))
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


def test_a_temperature_of_zero_names_the_key() -> None:
    with pytest.raises(ValueError, match="rollout.temperature"):
        logprobs.token_log_probs(torch.ones(1, 2), torch.ones(3, 2), torch.zeros(1, dtype=torch.long), temperature=0.0)


def test_values_are_those_of_the_predicting_positions(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    critic = _build(path, kind="value", seed=3)
    prompts, responses = _rows()
    got = forward_values(critic, pack_rows(prompts, responses))
    plain = AutoModelForTokenClassification.from_pretrained(path, num_labels=1, dtype=torch.float32).eval()
    plain.load_state_dict(dict(full_parameters(critic)))
    expected = []
    for prompt, response in zip(prompts, responses):
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        expected.append(plain(ids).logits[0, len(prompt) - 1 : len(prompt) - 1 + len(response), 0])
    torch.testing.assert_close(got, torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_a_folder_without_weights_gives_the_same_random_model_for_a_seed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_config().save_pretrained(tmp_path)
    assert not has_weights(str(tmp_path))
    first, again, other = (_build(str(tmp_path), seed=seed) for seed in (1, 1, 2))
    same = [torch.equal(a.full_tensor(), b.full_tensor()) for a, b in zip(first.parameters(), again.parameters())]
    assert all(same)
    assert not torch.equal(first.lm_head.weight.full_tensor(), other.lm_head.weight.full_tensor())
    assert "random weights" in caplog.text


@pytest.mark.parametrize("named", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", "mixed"])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_weights_arrive_as_they_are_stored_whatever_the_config_names(
    tmp_path: Path, named: str, stored: str, wanted: torch.dtype
) -> None:
    path = Path(save_tiny_model(tmp_path))
    files = {name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()}
    files = {name: tensor + 1e-4 * torch.randn_like(tensor) for name, tensor in files.items()}
    if stored != "mixed":
        files = {name: tensor.to(getattr(torch, stored)) for name, tensor in files.items()}
    else:
        files = {name: tensor.bfloat16() if "mlp" in name else tensor for name, tensor in files.items()}
    save_file(files, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text()) | {"dtype": named}
    (path / "config.json").write_text(json.dumps(config))
    for name, got in full_parameters(_build(str(path), dtype=wanted)):
        assert got.dtype == wanted and torch.equal(got, files[name].to(wanted)), name


def test_files_beside_the_weights_say_nothing_of_their_dtype(tmp_path: Path) -> None:
    path = Path(save_tiny_model(tmp_path))
    weights = {name: torch.randn_like(tensor) for name, tensor in load_file(path / "model.safetensors").items()}
    (path / "model.safetensors").unlink()
    torch.save(weights, path / "pytorch_model.bin")
    save_file({"lora_A.weight": torch.zeros(2, 2, dtype=torch.bfloat16)}, path / "adapter_model.safetensors")
    for name, got in full_parameters(_build(str(path), dtype=torch.float32)):
        assert torch.equal(got, weights[name]), name


@pytest.mark.parametrize("read", ["pytorch_model.bin", "model.safetensors", "model.safetensors.index.json"])
def test_files_of_the_model_that_are_not_read_say_nothing_of_their_dtype(tmp_path: Path, read: str) -> None:
    path = Path(save_tiny_model(tmp_path))
    weights = {name: torch.randn_like(tensor) for name, tensor in load_file(path / "model.safetensors").items()}
    (path / "model.safetensors").unlink()
    if read == "pytorch_model.bin":
        torch.save(weights, path / read)
    elif read == "model.safetensors":
        save_file(weights, path / read, metadata={"format": "pt"})
        (path / "model-00001-of-00002.safetensors").write_bytes(b"half of it")
        (path / "model.old.safetensors").symlink_to("gone")
    else:
        for name, tensor in weights.items():
            save_file({name: tensor}, path / f"{name}.safetensors", metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": {name: f"{name}.safetensors" for name in weights}}
        (path / read).write_text(json.dumps(index))
    variant = {name: tensor.half() for name, tensor in weights.items()}
    save_file(variant, path / "model.fp16.safetensors", metadata={"format": "pt"})
    for name, got in full_parameters(_build(str(path), dtype=torch.float32)):
        assert torch.equal(got, weights[name]), name


def test_an_index_of_weights_that_is_damaged_names_the_key(tmp_path: Path) -> None:
    path = Path(save_tiny_model(tmp_path))
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"model')
    with pytest.raises(ValueError, match="cannot be read.*model.path"):
        _build(str(path))


def test_an_index_whose_files_were_not_copied_is_no_reason_for_random_weights(tmp_path: Path) -> None:
    path = Path(save_tiny_model(tmp_path))
    index = {"metadata": {}, "weight_map": {name: "model-1.safetensors" for name in load_file(path / "model.safetensors")}}
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="cannot be read.*model.path"):
        _build(str(path))


def test_a_missing_folder_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model.path"):
        _build(str(tmp_path / "nowhere"))


def test_packing_lays_rows_out_as_documented() -> None:
    packed = pack_rows([np.array([10, 11]), np.array([12])], [np.array([20, 21]), np.array([22])])
    assert packed.input_ids.tolist() == [[10, 11, 20, 21, 12, 22]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert packed.cu_seqlens.tolist() == [0, 4, 6]
    assert packed.predict_index.tolist() == [1, 2, 4]
    assert packed.labels.tolist() == [20, 21, 22]
    assert packed.scatter_response(torch.tensor([1.0, 2.0, 3.0]), 3).tolist() == [[1, 2, 0], [3, 0, 0]]
    assert packed.gather_response(torch.tensor([[1, 2, 9], [3, 9, 9]])).tolist() == [1, 2, 3]


def test_dropout_is_refused() -> None:
    tensor = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="attention_dropout"):
        packed_attention(torch.nn.Module(), tensor, tensor, tensor, None, dropout=0.1)


@pytest.mark.parametrize("kind", ["causal_lm", "value"])
def test_weights_that_are_not_in_the_files_are_not_drawn(tmp_path: Path, kind: str) -> None:
    path = Path(save_tiny_model(tmp_path))
    weights = load_file(path / "model.safetensors")
    name = next(name for name in weights if "q_proj.weight" in name)
    save_file({k: v for k, v in weights.items() if k != name}, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{path} lack 1 of the model's weights, such as {name}.*model.path"):
        _build(str(path), kind=kind)
    save_file({}, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="such as .*, which would be random"):
        _build(str(path), kind=kind)


def test_an_adapter_in_the_folder_is_refused(tmp_path: Path) -> None:
    path = Path(save_tiny_model(tmp_path))
    (path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=rf"model.path={path} holds a LoRA adapter"):
        _build(str(path))


def test_weights_that_cannot_be_read_are_reported_with_the_folder(tmp_path) -> None:
    path = Path(save_tiny_model(tmp_path))
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=rf"the weights in {path} cannot be read \(SafetensorError: .*model.path has to be"):
        _build(str(path))
