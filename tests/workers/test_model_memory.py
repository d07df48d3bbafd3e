"""Which models an update's memory is worked out for, and what it counts: their dtype, device, what is trained of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, GPT2Config, MixtralConfig, PretrainedConfig, Qwen2ForCausalLM

from tests.workers.tiny import actor_config, embedded_config, tiny_config
from verl.models import activation_memory
from verl.models.activation_memory import ActivationMemory, activation_bytes_per_token, gradient_bytes
from verl.models.build import ModelSpec, build_model
from verl.models.heads import VALUE_HEAD
from verl.models.lora import LoraSettings
from verl.models.memory_plan import launch_tokens
from verl.utils.fsdp_memory import working_bytes
from verl.utils.fsdp_utils import (
    SMALL_MODEL,
    ShardingOptions,
    begin_micro_batch,
    create_device_mesh,
    ensure_process_group,
)
from verl.workers.actor import DataParallelPPOActor
from verl.workers.critic import DataParallelPPOCritic

GPU = torch.device("cuda", 0)
GIB = 1 << 30
OTHERS = {
    "gpt2": GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=2, n_positions=128, bos_token_id=0, eos_token_id=1),
    "mixtral": MixtralConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_experts_per_tok=3,
    ),
}  # fmt: skip
# Numbers that a token leaves in a layer: 12 x 64 of the hidden size; heads, keys and values; the MLP.
NUMBERS = {
    "qwen2": 768 + 32 * (3 * 2 + 3) + 4 * 96, "qwen3": 768 + 32 * (3 * 2 + 3) + 4 * 96, "llama": 768 + 288 + 384,
    "gpt2": 768 + 32 * (3 * 2 + 3 * 2) + 4 * (4 * 64), "mixtral": 768 + 288 + 3 * (4 * 96 + 2 * 64),
}  # fmt: skip


@pytest.fixture(autouse=True)
def group() -> None:
    ensure_process_group("cpu")


def _model(folder: Path, config: PretrainedConfig, options: ShardingOptions, **spec: object) -> torch.nn.Module:
    config.save_pretrained(folder)
    return build_model(ModelSpec(str(folder), **spec), create_device_mesh(1, -1, "cpu"), options)


@pytest.mark.parametrize("family", NUMBERS)
def test_activations_are_estimated_in_the_dtype_of_compute(tmp_path: Path, family: str) -> None:
    config = OTHERS.get(family) or tiny_config(family)
    assert activation_bytes_per_token(_model(tmp_path, config, ShardingOptions())) == 4 * NUMBERS[family]
    mixed = _model(tmp_path, config, ShardingOptions(torch.bfloat16, torch.float32))
    assert activation_bytes_per_token(mixed) == 2 * NUMBERS[family]


@pytest.mark.parametrize(("family", "mlp"), [("qwen2", 96), ("mixtral", 3 * 96)])
def test_a_micro_batch_costs_as_many_tokens_as_compute_what_a_token_passes_through(family: str, mlp: int) -> None:
    model = AutoModelForCausalLM.from_config(OTHERS.get(family) or tiny_config(family))
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * mlp  # queries and output, keys and values, the MLP
    assert ActivationMemory(model)._launches == launch_tokens(2, 2 * layer)


def test_a_model_that_fsdp_did_not_shard_computes_in_the_dtype_of_its_parameters() -> None:
    model = Qwen2ForCausalLM(tiny_config())
    assert activation_bytes_per_token(model) == 4 * NUMBERS["qwen2"]
    assert activation_bytes_per_token(model.to(torch.bfloat16)) == 2 * NUMBERS["qwen2"]


@pytest.mark.parametrize("kind", ["causal_lm", "value"])
def test_only_what_is_trained_has_gradients(tmp_path: Path, kind: str) -> None:
    lora = LoraSettings(4, 8.0, "all-linear", VALUE_HEAD if kind == "value" else None)
    model = _model(tmp_path, tiny_config(), ShardingOptions(), kind=kind, lora=lora, gradient_checkpointing=True)
    layer = 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 96))  # rank, inputs and outputs: q and o, k and v, the MLP
    assert gradient_bytes(model, torch.device("cpu")) == 4 * (2 * layer + (64 + 1 if kind == "value" else 0))
    assert gradient_bytes(model, GPU) == 0  # none where the parameters are not: FSDP offloads both
    assert len(ActivationMemory(model).adjustable) == 2


@pytest.mark.parametrize(("dtype", "reduce_dtype", "width"), [
    (torch.float32, torch.float32, 4), (torch.bfloat16, torch.float32, 4), (torch.bfloat16, None, 2),
])  # fmt: skip
def test_a_single_rank_adds_its_gradients_up_in_the_dtype_of_reduction(
    tmp_path: Path, dtype: torch.dtype, reduce_dtype: torch.dtype | None, width: int
) -> None:
    options = ShardingOptions(torch.bfloat16 if dtype == torch.float32 else None, reduce_dtype)
    model = _model(tmp_path, tiny_config(), options, dtype=dtype)
    count = sum(p.numel() for p in model.parameters())
    assert gradient_bytes(model, torch.device("cpu")) == width * count
    begin_micro_batch(model, last=False)
    model(torch.arange(4)[None]).logits.sum().backward()
    units = [module._get_fsdp_state()._fsdp_param_group for module in model.modules() if isinstance(module, FSDPModule)]
    held = [p.unsharded_accumulated_grad for unit in units for p in unit.fsdp_params]
    if held[0] is None:  # it need not be another dtype
        held = [p._unsharded_param.grad for unit in units for p in unit.fsdp_params]
    assert sum(gradient.nbytes for gradient in held) == width * count


@pytest.mark.parametrize("lora", [None, LoraSettings(4, 8.0)])
def test_what_units_at_work_take_does_not_depend_on_the_update_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: LoraSettings | None
) -> None:
    """Of a model that stays gathered: gradients of the root and two layers, in bf16 and as they are reduced."""
    options = ShardingOptions(torch.bfloat16, torch.float32, gathered_below=SMALL_MODEL)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)  # on a single rank nothing is reduced
    model = _model(tmp_path, tiny_config(layers=4), options, lora=lora, gradient_checkpointing=True)
    at_work = [p for name, p in model.named_parameters() if not name.startswith(("model.layers.2.", "model.layers.3."))]
    trained = sum(p.numel() for p in at_work if p.requires_grad)
    memory = ActivationMemory(model)
    before, ways = memory._memory(), []
    assert before.fixed == 4 * GIB + (2 + 4) * trained
    full = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    for missing in (0, 1, 0):  # of the room for full gradients, which take the place of those that are reduced
        free = before.needed(100, 0) - 4 * trained + full - missing
        monkeypatch.setattr(memory, "_free", lambda free=free: free)
        assert memory.fit([[100, 100]]) == 0
        ways.append(model.sharding_options.reduce_once)
        assert memory._memory() == before
    assert ways == [True, False, True]


def test_a_model_that_frees_its_weights_reduces_in_every_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    options = ShardingOptions(torch.bfloat16, torch.float32)
    model = _model(tmp_path, tiny_config(layers=4), options, gradient_checkpointing=True)
    memory = ActivationMemory(model)
    before = memory._memory()
    assert before.fixed == 4 * GIB + working_bytes(model)
    for missing, recomputed in ((0, 0), (1, 1)):
        free = before.needed(100, 0) - missing
        monkeypatch.setattr(memory, "_free", lambda free=free: free)
        assert memory.fit([[100, 100]]) == recomputed
        assert not model.sharding_options.reduce_once
        assert memory._memory() == before


def test_memory_is_that_of_the_device_that_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that are offloaded, as they are when a worker is set up, say nothing about it."""
    asked: list[torch.device] = []
    monkeypatch.setattr(activation_memory, "allocated_bytes", lambda device: len(asked.append(device) or ()))
    policy, value = (_model(tmp_path, tiny_config(), ShardingOptions(), kind=kind) for kind in ("causal_lm", "value"))
    critic = DataParallelPPOCritic(embedded_config().critic, value, torch.optim.SGD(value.parameters()), device=GPU)
    for trained in (DataParallelPPOActor(actor_config(), policy, device=GPU), critic):
        with trained.memory.measured(10, gathers=False):
            pass
    assert set(asked) == {GPU}
    assert DataParallelPPOActor(actor_config(), policy).memory.device == torch.device("cpu")


@pytest.mark.parametrize("gathers", [True, False])
def test_weights_of_the_root_are_no_activations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gathers: bool) -> None:
    allocated = 0
    monkeypatch.setattr(activation_memory, "allocated_bytes", lambda device: allocated)
    memory = ActivationMemory(_model(tmp_path, tiny_config("llama"), ShardingOptions(torch.bfloat16, torch.float32)))
    with memory.measured(2000, gathers=gathers):
        allocated += 2 * 2000 * 700 + 2 * (2 * 97 * 64 + 64)  # embedding, output layer and final norm in bf16
    assert memory.bytes_per_token == 700


def test_a_filler_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a rank has nothing but fillers: constant costs over few tokens would count for all later updates."""
    allocated = 0
    monkeypatch.setattr(activation_memory, "allocated_bytes", lambda device: allocated)
    memory = ActivationMemory(Qwen2ForCausalLM(tiny_config()))
    with memory.measured(2, gathers=True):
        allocated += 1 << 30
    assert memory.bytes_per_token is None
    with memory.measured(4096, gathers=True):
        allocated += 2 * 4096 * 700
    assert memory.bytes_per_token == 700
