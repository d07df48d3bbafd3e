"""Layers and head compile once for each use, whatever the sizes of micro-batches and the number of recomputed layers.

The layers are those of a GPU run, the variable-length attention op included, for which a CPU kernel stands in.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.update_phase import RowSizes, make_rows
from tests.workers.ranks import run_ranks
from tests.workers.tiny import VOCABULARY, actor_config, random_rows, save_tiny_model
from verl.models import logprobs
from verl.models.build import ModelSpec, build_model
from verl.models.heads import forward_log_probs
from verl.models.packing import PackedRows
from verl.trainer.config import default_config
from verl.utils.checkpoint.hf_export import full_parameters
from verl.utils.compiled_layers import same_kind_of_input
from verl.utils.fsdp_utils import (
    ShardingOptions,
    create_device_mesh,
    decoder_layers,
    ensure_process_group,
)
from verl.workers import role_models
from verl.workers.actor import DataParallelPPOActor
from verl.workers.rows import RaggedRows

MIXED = ShardingOptions(torch.bfloat16, torch.float32)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def _actor(path: str, options: ShardingOptions = MIXED) -> DataParallelPPOActor:
    mesh = create_device_mesh(dist.get_world_size(), -1, "cpu")
    module = build_model(ModelSpec(path, seed=7, gradient_checkpointing=True), mesh, options)
    config = actor_config(use_dynamic_bsz=False, ppo_micro_batch_size_per_gpu=4, use_kl_loss=False)
    return DataParallelPPOActor(config, module, torch.optim.SGD(module.parameters(), lr=0.05), response_length=32)


def _recompute(actor: DataParallelPPOActor, count: int) -> None:
    for index, layer in enumerate(decoder_layers(actor.actor_module)):
        layer.gradient_checkpointing = index < count


def _varlen_on_cpu() -> None:
    """Give torch's variable-length attention a CPU kernel; its gradient has the right shapes only."""
    from torch.nn.attention import varlen

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = zip(*(x.transpose(0, 1).split(cu_seqlens.diff().tolist(), dim=1) for x in (q, k, v)))
        out = [F.scaled_dot_product_attention(*row, is_causal=True, enable_gqa=True).transpose(0, 1) for row in rows]
        return torch.cat(out), torch.zeros(q.shape[1], len(q)), torch.zeros(2, dtype=torch.uint64)

    def backward(
        gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return gradient.clone(), torch.zeros_like(k), torch.zeros_like(v)

    varlen._varlen_attn.register_kernel("cpu")(forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)


@contextlib.contextmanager
def _as_on_a_gpu(backend: str | Callable[..., Any]) -> Iterator[None]:
    """Layers compile with a backend that is quicker than the one of a run, and use the variable-length attention."""
    os.environ.pop("TORCHDYNAMO_DISABLE", None)
    torch._dynamo.config.disable = False
    _varlen_on_cpu()
    compiled = functools.partialmethod(nn.Module.compile, backend=backend)
    inputs = functools.partialmethod(PackedRows.model_inputs, has_kernel=True)
    with mock.patch.object(nn.Module, "compile", compiled), mock.patch.object(PackedRows, "model_inputs", inputs):
        yield


def _graphs_after_each_part(path: str) -> list[int]:
    """Graphs compiled so far, after log-probs of policy and reference, an update, and everything that follows."""
    graphs, options = [], ShardingOptions(torch.bfloat16, torch.float32, compile_layers=True)
    with _as_on_a_gpu("aot_eager"):
        actor = _actor(path, options)
        reference = _reference(path, actor, options)
        for part, (longest, recomputed) in enumerate([(30, 0), (300, 1), (60, 2), (700, 0), (90, 1)]):
            rows = make_rows(16 + part, VOCABULARY, part, RowSizes((4, longest), (2, 9)))
            for call in (actor.compute_log_prob, reference.compute_log_prob, actor.update_policy):
                if call == actor.update_policy:
                    _recompute(actor, recomputed)
                call(rows)
                graphs += [torch._dynamo.utils.counters["stats"]["unique_graphs"]] * (part == 0)
        nothing = RaggedRows(rows).pack([], "cpu")  # what a rank runs that has fewer micro-batches than others
        sum(x.sum() for x in forward_log_probs(actor.actor_module, nothing, 1.0)).backward()
    return [*graphs, torch._dynamo.utils.counters["stats"]["unique_graphs"]]


def _reference(path: str, actor: DataParallelPPOActor, options: ShardingOptions) -> DataParallelPPOActor:
    config = default_config("preset=embedded").actor_rollout_ref
    mesh = create_device_mesh(dist.get_world_size(), -1, "cpu")
    with mock.patch.object(role_models, "sharding_options", return_value=options):
        module = role_models.build_role_model(config.model, config.ref.fsdp_config, path, mesh, trainable=False)
    return DataParallelPPOActor(actor.config, module)


def test_layers_compile_once_without_and_once_with_gradients(model_path: str) -> None:
    (graphs,) = run_ranks(_graphs_after_each_part, 1, model_path)
    assert graphs == [1, 1, 2, 2], "the reference uses what was compiled for the policy"


def _variables_of_graphs(path: str) -> list[tuple[set[int], list[torch.dtype]]]:
    """Of every graph that is traced: values of the numbers it takes, and dtypes of its tensors that are one number."""
    found = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        values = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        sizes = {int(value) for value in values if isinstance(value, torch.SymInt)}
        found.append((sizes, [value.dtype for value in values if isinstance(value, torch.Tensor) and not value.dim()]))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    with _as_on_a_gpu(backend):
        actor = _actor(path, ShardingOptions(torch.bfloat16, torch.float32, compile_layers=True))
        rows = make_rows(4, VOCABULARY, sizes=RowSizes((300, 300), (10, 10)))
        actor.compute_log_prob(rows)
        actor.update_policy(rows)
    return found


def test_only_tokens_rows_and_the_bound_of_lengths_are_variables_of_a_graph(model_path: str) -> None:
    """Traced once each, without a first try: a number of the model as a variable makes the compiler begin again."""
    (found,) = run_ranks(_variables_of_graphs, 1, model_path)
    tokens, borders, bound = 4 * 310, 4 + 1, 512
    assert found == [({tokens, borders, bound}, [])] * 2


def _cache_uses(path: str, folder: str) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    """How often compiled layers were looked for in a cache in ``folder`` by the outcome, and the weights after."""
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder), _as_on_a_gpu("inductor"):
        actor = _actor(path, ShardingOptions(torch.bfloat16, torch.float32, compile_layers=True))
        rows = random_rows(12)
        actor.compute_log_prob(rows)
        actor.update_policy(rows)
    counts = torch._dynamo.utils.counters["aot_autograd"]
    outcomes = {name: counts[f"autograd_cache_{name}"] for name in ("miss", "hit", "bypass")}
    return outcomes, {name: tensor.clone() for name, tensor in full_parameters(actor.actor_module)}


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch builds CPU kernels with a C++ compiler")
@pytest.mark.recipes  # compiles in two processes
def test_a_later_process_finds_all_compiled_layers_in_the_cache(model_path: str, tmp_path: Path) -> None:
    (first, weights), (later, same) = (run_ranks(_cache_uses, 1, model_path, str(tmp_path))[0] for _ in range(2))
    assert (first, later) == ({"miss": 2, "hit": 0, "bypass": 0}, {"miss": 0, "hit": 2, "bypass": 0})
    assert [name for name in weights if not torch.equal(weights[name], same[name])] == []


def _graphs_of_the_head() -> list[int]:
    """Graphs compiled so far: without gradients, with entropy too, with gradients, and after all other sizes."""
    os.environ.pop("TORCHDYNAMO_DISABLE", None)
    torch._dynamo.config.disable = False
    for function in (logprobs._statistics, logprobs._logits_gradient):
        logprobs._compiled[function.__name__] = torch.compile(function, dynamic=True, backend="aot_eager")
    graphs = []

    def run(tokens: int, with_entropy: bool = True, grad: bool = False) -> None:
        hidden, weight = (torch.randn(n, 16).requires_grad_() for n in (tokens, VOCABULARY))
        labels = torch.randint(VOCABULARY, (tokens,))
        with torch.set_grad_enabled(grad):
            log_probs, entropy = logprobs.token_log_probs(hidden, weight, labels, 1.0, with_entropy)
        if grad:
            (log_probs.square() + entropy).sum().backward()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    chunks_of_64 = mock.patch.dict(logprobs._CHUNK_ELEMENTS, cpu=64 * VOCABULARY)
    with mock.patch.object(logprobs, "_COMPILED_ON", {"cpu"}), chunks_of_64:
        run(40, with_entropy=False)
        run(30)
        run(50, grad=True)
        for tokens in (1, 20, 65, 150, 64, 200):
            run(tokens)
            run(tokens, with_entropy=False)
            run(tokens, grad=True)
    return [*graphs[:3], graphs[-1]]


def test_the_head_compiles_once_for_each_use() -> None:
    (graphs,) = run_ranks(_graphs_of_the_head, 1)
    assert graphs == [1, 2, 3, 3]


def _weights(path: str, hook: bool) -> dict[str, torch.Tensor]:
    actor = _actor(path)
    for layer in decoder_layers(actor.actor_module) if hook else ():
        layer.register_forward_pre_hook(same_kind_of_input, with_kwargs=True)
    _recompute(actor, 1)
    actor.update_policy(random_rows(12))
    return {name: tensor.clone() for name, tensor in full_parameters(actor.actor_module)}


def test_what_makes_inputs_alike_changes_no_bit(model_path: str) -> None:
    ensure_process_group("cpu")
    plain, alike = _weights(model_path, False), _weights(model_path, True)
    assert [name for name in plain if not torch.equal(plain[name], alike[name])] == []
