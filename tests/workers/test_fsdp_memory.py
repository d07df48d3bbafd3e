"""What FSDP takes for units at work, counted in torch's allocator while real ranks run a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._profiler import _EventType
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig

from tests.workers.ranks import run_ranks
from tests.workers.tiny import tiny_config
from verl.models.build import ModelSpec, build_model
from verl.models.heads import forward_log_probs, forward_values
from verl.models.lora import LoraSettings
from verl.models.packing import pack_rows
from verl.utils.fsdp_memory import working_bytes
from verl.utils.fsdp_utils import ShardingOptions, begin_micro_batch, create_device_mesh, ensure_process_group

HIDDEN, MLP, WORDS, LAYERS = 256, 512, 1024, 4
SHAPE = {
    "vocab_size": WORDS, "hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 256, "num_experts_per_tok": 8, "mlp_only_layers": [0, 1]}
CONFIGS: dict[str, PretrainedConfig] = {
    "tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "untied": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "experts": Qwen3MoeConfig(**SHAPE, **EXPERTS, tie_word_embeddings=True),
}
# Parameters of an embedding, and of a layer: queries, keys, values and output, MLP and two norms.
EMBEDDING = WORDS * HIDDEN
LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * MLP + 2 * HIDDEN
EXPERT_LAYER = 4 * HIDDEN * HIDDEN + 8 * (3 * HIDDEN * 256 + HIDDEN) + 2 * HIDDEN + 2 * 32
ADAPTERS = 4 * (4 * (HIDDEN + HIDDEN) + 3 * (HIDDEN + MLP))
OF_GLOO, GATHERING, COMPUTE = ("gloo:", "c10d::"), "FSDP::all_gather", ""  # where memory is allocated
LORA = LoraSettings(4, 8.0, "all-linear", None)
ROW = pack_rows([np.array([5, 6])], [np.array([7, 8])], "cpu")


@dataclass(frozen=True)
class Peaks:
    """Bytes of a micro-batch above what was there before: of gathering, of all else while layers are at work."""

    gathering: int
    compute: int
    working: int  # as worked out


def _allocations(events: list[Any], scope: str = "") -> Iterator[tuple[int, int, int, str]]:
    """``(time, bytes, address, scope)`` of all that was allocated (bytes above 0) or freed (below 0).

    The scope is the innermost range of FSDP or, for what gloo takes for itself and NCCL does not, that collective.
    """
    for event in events:
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            yield event.start_time_ns, fields.alloc_size, fields.ptr, scope
        else:
            named = event.name.startswith(("FSDP::", *OF_GLOO)) and not scope.startswith(OF_GLOO)
            yield from _allocations(event.children, event.name if named else scope)


def _peaks(folder: str, shards: int, **spec: Any) -> Peaks:
    torch.set_num_threads(1)
    ensure_process_group("cpu")
    mesh = create_device_mesh(dist.get_world_size(), shards, "cpu")
    model = build_model(ModelSpec(folder, **spec), mesh, ShardingOptions(torch.bfloat16, torch.float32))

    def micro_batch() -> None:
        begin_micro_batch(model, last=True)
        if spec.get("kind") == "value":
            forward_values(model, ROW).sum().backward()
        else:
            forward_log_probs(model, ROW, 1.0)[0].sum().backward()

    micro_batch()  # gradients of this rank are there from now on
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        micro_batch()
    events = sorted(_allocations(profiler.profiler.kineto_results.experimental_event_tree()))
    sums, peaks = {GATHERING: 0, COMPUTE: 0, OF_GLOO: 0}, {}
    kinds: dict[int, object] = {}  # by address
    for _, size, address, scope in events:
        part = scope.partition(" (")[0]
        if scope == "FSDP::post_backward_reduce (model.layers.0)":
            break
        if size > 0:
            kinds[address] = OF_GLOO if scope.startswith(OF_GLOO) else GATHERING if part == GATHERING else COMPUTE
        sums[kinds.pop(address, COMPUTE) if size < 0 else kinds[address]] += size
        if part != "FSDP::post_backward_reduce":  # gradients are cast there, on a CPU one by one
            peaks = {kind: max(peaks.get(kind, 0), total) for kind, total in sums.items()}
    return Peaks(peaks[GATHERING], peaks[COMPUTE], working_bytes(model))


# Parameters of the root and of the largest layer; of each, what is trained.
ROOTS = {
    "tied": EMBEDDING + HIDDEN, "untied": 2 * EMBEDDING + HIDDEN, "experts": EMBEDDING + HIDDEN,
    "lora": 2 * EMBEDDING + HIDDEN, "value": EMBEDDING + 2 * HIDDEN + 1,
}  # fmt: skip
LARGEST = {
    "tied": LAYER + 3 * HIDDEN, "untied": LAYER, "experts": EXPERT_LAYER, "lora": LAYER + ADAPTERS, "value": LAYER
}  # fmt: skip
# Bytes while the layer with the most is at work: weights of the root, gradients of the output layer, the layer's
# weights and gradients in bf16, and gradients of the layer after it in float32.
AT_WORK = {
    "tied": 4 * (EMBEDDING + HIDDEN) + 8 * (LAYER + 3 * HIDDEN),  # queries, keys and values have a bias
    "untied": 2 * (2 * EMBEDDING + HIDDEN) + 2 * (EMBEDDING + HIDDEN) + 8 * LAYER,
    "experts": 4 * (EMBEDDING + HIDDEN) + 8 * EXPERT_LAYER,
    "lora": 2 * (2 * EMBEDDING + HIDDEN) + 2 * LAYER + 8 * ADAPTERS,
    "value": 2 * (EMBEDDING + HIDDEN + HIDDEN + 1) + 2 * (HIDDEN + HIDDEN + 1) + 8 * LAYER,
}
SLACK = 2 * HIDDEN * MLP  # activations of four tokens, and what kernels of a CPU take: less than one weight


def _every_model(folders: dict[str, str]) -> dict[str, Peaks]:
    specs = {"lora": {"lora": LORA}, "value": {"kind": "value"}}
    return {name: _peaks(folders.get(name, folders["untied"]), -1, **specs.get(name, {})) for name in ROOTS}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {name: str(tmp_path_factory.mktemp(name)) for name in CONFIGS}
    for name, config in CONFIGS.items():
        config.save_pretrained(made[name])
    return made


def test_ranks_that_share_a_model_take_what_is_worked_out(folders: dict[str, str]) -> None:
    """Flat buffers to the byte: that of one unit, that of the next, and this rank's part of it."""
    for peaks in run_ranks(_every_model, 2, folders):
        for name, peak in peaks.items():
            gathering = 2 * (max(LARGEST[name], ROOTS[name]) + 1.5 * LARGEST[name])
            assert peak.gathering == gathering, name
            assert AT_WORK[name] <= peak.compute <= AT_WORK[name] + SLACK, name
            reduced = 4 * (ADAPTERS if name == "lora" else max(LARGEST[name], ROOTS[name]))
            assert peak.working == AT_WORK[name] + gathering + reduced // 2, name


@pytest.mark.parametrize("name", ["tied", "experts"])
def test_a_single_rank_gathers_nothing_ahead_and_reduces_in_place(folders: dict[str, str], name: str) -> None:
    peak = _peaks(folders[name], -1)
    assert peak.gathering == 0 and peak.working == AT_WORK[name]
    assert AT_WORK[name] <= peak.compute <= AT_WORK[name] + SLACK


def test_copies_of_a_model_keep_each_units_gradients_until_the_backward_ends(folders: dict[str, str]) -> None:
    """Two ranks, each a copy. When the first layer is at work, gradients of the three after it are kept."""
    for peak in run_ranks(_peaks, 2, folders["untied"], 1):
        assert peak.gathering == 0
        kept = (LAYERS - 1) * 4 * LAYER
        assert AT_WORK["untied"] + kept <= peak.compute <= AT_WORK["untied"] + kept + SLACK
        assert peak.working == AT_WORK["untied"] + LAYERS * 4 * LAYER + 4 * ROOTS["untied"]


def test_what_is_not_sharded_takes_nothing() -> None:
    assert working_bytes(Qwen2ForCausalLM(tiny_config())) == 0
