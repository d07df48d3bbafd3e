"""Buckets of weights over real gloo ranks: every tensor bit for bit, few collectives, two buckets of memory."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.workers.ranks import run_ranks
from verl.workers.host_copies import OffloadedParameters
from verl.workers.sharding_manager.weight_buckets import BucketedGather, Source
from verl.workers.sharding_manager.weight_stream import plan_weights, stream_weights

DTYPES = (torch.float32, torch.bfloat16)
BUCKETS = (1, 200, 1 << 20)  # bytes: a bucket for each tensor, for a few, for all
COMPARED = 2 * len(DTYPES) * len(BUCKETS) * 14  # names of `Odd`


class Watch(TorchDispatchMode):
    """Counts collectives, and the bytes of storages that operations made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[str] = []
        self.live: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if type(leaf) is torch.Tensor}
        if DTensor in types:
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.name():
            self.collectives.append(func.name())
        for leaf in tree_leaves(out):
            if type(leaf) is torch.Tensor and leaf.untyped_storage()._cdata not in given | self.live.keys():
                storage = leaf.untyped_storage()
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.most = max(self.most, sum(self.live.values()))
        return out


class Odd(nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, three dimensions, a tied head, a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, width) for width in (6, 7, 1, 2))
        self.stack = nn.Parameter(torch.randn(5, 3, 7))
        self.scale = nn.Parameter(torch.randn(1))
        self.plain = nn.Parameter(torch.randn(3, 3), requires_grad=False)
        self.narrow = nn.Parameter(torch.randn(3, 5).bfloat16(), requires_grad=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[0](self.embed(tokens)))


def odd_model(mesh: DeviceMesh, whole: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A sharded model and what it held before."""
    torch.manual_seed(7)
    model = Odd()
    original = {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}
    if not whole:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.plain})
    return model, original


def check_every_tensor(shape: tuple[int, ...]) -> int:
    """Compares all streams of all sizes; returns how many tensors were compared."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp")[-len(shape) :])
    compared = 0
    for whole in (True, False):
        model, original = odd_model(mesh, whole)
        model(torch.arange(5))  # leaves the root gathered
        assert not isinstance(model.stack, DTensor) and not isinstance(model.plain, DTensor)
        for dtype in DTYPES:
            for bucket_bytes in BUCKETS:
                stream = stream_weights(plan_weights(model), dtype, "cpu", bucket_bytes)
                arrived = list(stream)  # all are held to the end, and none may change by then
                assert [name for name, _ in arrived] == list(original)
                for name, tensor in arrived:
                    assert tensor.dtype == dtype and tensor.is_contiguous()
                    assert torch.equal(tensor, original[name].to(dtype)), name
                    compared += 1
        OffloadedParameters(model, torch.device("cpu"))  # as `param_offload` leaves them
        interrupted = iter(stream_weights(plan_weights(model), torch.float32, "cpu", 200))
        next(interrupted)
        interrupted.close()  # a receiver that failed
        for name, tensor in stream_weights(plan_weights(model), torch.float32, "cpu"):
            assert torch.equal(tensor, original[name].float())
    return compared


@pytest.mark.parametrize("ranks", [2, 3])
def test_streamed_tensors_are_the_originals(ranks: int) -> None:
    assert run_ranks(check_every_tensor, ranks, (ranks,)) == [COMPARED] * ranks


def placements() -> Iterator[tuple[torch.Size, tuple]]:
    for shape in ((5, 4), (2, 3)):
        yield shape, (Replicate(), Shard(0))
        yield shape, (Shard(0), Replicate())
        yield shape, (Replicate(), Replicate())
        yield shape, (Replicate(), Shard(1))
        yield shape, (Shard(0), Shard(0))


def check_other_placements(mesh: DeviceMesh) -> int:
    torch.manual_seed(3)
    full = [torch.randn(shape) for shape, _ in placements()]
    split = [distribute_tensor(tensor, mesh, where) for tensor, (_, where) in zip(full, placements())]
    gather = BucketedGather([[Source(tensor, torch.bfloat16)] for tensor in split], "cpu")
    for (tensor,), expected in zip(gather, full, strict=True):
        assert torch.equal(tensor, expected.bfloat16())
    return gather.collectives


def check_two_dimensions() -> tuple[int, int]:
    compared = check_every_tensor((2, 2))
    return compared, check_other_placements(init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp")))


def test_meshes_of_two_dimensions() -> None:
    """HSDP gathers within its groups; what cannot share a bucket goes by itself, or not at all where every rank has it."""
    assert run_ranks(check_two_dimensions, 4) == [(COMPARED, 1)] * 4


def check_cost() -> tuple[list[str], int, int, int, int]:
    """A plain stack of 24 layers of 64 x 64 float32 (16 KiB each) and a tied 60 KiB embedding, buckets of 32 KiB."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(240, 64), *(nn.Linear(64, 64, bias=False) for _ in range(24)))
    model.append(nn.Linear(64, 240, bias=False))
    model[-1].weight = model[0].weight
    fully_shard(model)
    plan = plan_weights(model)
    runs = []
    for _ in range(3):  # gloo's thread lets go of a buffer a little after the collective: the least of three
        with Watch() as watch:
            for _, tensor in stream_weights(plan, torch.float32, "cpu", 32 << 10):
                assert tensor.shape[1] == 64
                time.sleep(0.001)
        runs.append(watch)
    gather = BucketedGather([[Source(weight.parameter, torch.float32)] for weight in plan], "cpu", 32 << 10)
    most, left = min(run.most for run in runs), min(sum(run.live.values()) for run in runs)
    return watch.collectives, gather.collectives, most, len(plan), left


def check_adapters() -> int:
    """Merged from shards as from whole weights, bit for bit."""
    from tests.rollout import tiny
    from verl.models.lora import LoraSettings, add_lora

    model = add_lora(tiny.build_model(), LoraSettings(rank=3, alpha=16))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    plan = plan_weights(model)
    expected = {d: [(n, t.clone()) for n, t in stream_weights(plan, d, "cpu")] for d in DTYPES}
    assert sum(len(weight.updates) for weight in plan) > 10
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    for dtype, bucket_bytes in ((torch.float32, 1 << 17), (torch.bfloat16, 1 << 17), (torch.bfloat16, 1 << 30)):
        with Watch() as watch:
            arrived = list(stream_weights(plan_weights(model), dtype, "cpu", bucket_bytes))
        for (name, tensor), (expected_name, expected_tensor) in zip(arrived, expected[dtype], strict=True):
            assert name == expected_name and tensor.dtype == dtype
            assert torch.equal(tensor, expected_tensor), name
        assert 1 <= len(watch.collectives) < len(plan)
    return len(watch.collectives)


def check_cost_and_adapters() -> tuple[tuple, int]:
    return check_cost(), check_adapters()


def test_few_collectives_and_two_buckets_of_memory() -> None:
    for (collectives, planned, most, tensors, left), of_adapters in run_ranks(check_cost_and_adapters, 2):
        assert tensors == 26
        assert len(collectives) == planned == 1 + 24 // 2, "the embedding once, then two layers at a time"
        assert all("allgather" in name.lower() for name in collectives)
        buckets, embedding, held = 2 * (32 << 10), 60 << 10, 2 * (16 << 10)
        assert buckets + embedding <= most <= buckets + embedding + held, "a tied tensor is kept for its second name"
        assert left <= embedding + held, "buckets are gone with the stream"
        assert of_adapters == 1, "adapters travel in the buckets"
