"""Dispatch over a grid of data-, tensor-, pipeline- and context-parallel ranks.

The group must know its layout: ``group.get_megatron_global_info() -> DistGlobalInfo`` and
``group.get_megatron_rank_info(rank) -> DistRankInfo``. No worker of this project is laid out that way; the modes
serve groups that users bring along.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from verl.single_controller.base.dispatch import (
    Arguments,
    _concat_data_proto_or_future,
    _map_arguments,
    _split_args_kwargs_data_proto,
)
from verl.single_controller.base.row_types import is_rows_to_come

if TYPE_CHECKING:
    from verl.protocol import DataProto, DataProtoFuture


def data_parallel_parts(worker_group: Any) -> int:
    """Parts when only data-parallel ranks see different rows."""
    return worker_group.get_megatron_global_info().dp_size


def pipeline_data_parallel_parts(worker_group: Any) -> int:
    """Parts when pipeline and context ranks are used as further data-parallel ranks."""
    info = worker_group.get_megatron_global_info()
    return info.dp_size * info.pp_size * info.cp_size


def _part_of_pipeline_rank(worker_group: Any, rank: int) -> int:
    sizes, info = worker_group.get_megatron_global_info(), worker_group.get_megatron_rank_info(rank=rank)
    return (info.dp_rank * sizes.cp_size + info.cp_rank) * sizes.pp_size + info.pp_rank


def _spread(worker_group: Any, parts: int, part_of_rank: Callable[[int], int], args: tuple, kwargs: dict) -> Arguments:
    """Give every rank its element of each argument, a list of ``parts`` elements (or a future to cut)."""

    def spread(value: Any) -> list:
        elements = value.chunk(chunks=parts) if is_rows_to_come(value) else value
        assert isinstance(elements, (tuple, list)) and len(elements) == parts, f"expected lists of {parts} elements"
        return [elements[part_of_rank(rank)] for rank in range(worker_group.world_size)]

    split_args, split_kwargs = _map_arguments(spread, args, kwargs)
    return tuple(split_args), split_kwargs


def dispatch_compute(worker_group: Any, *args: Any, **kwargs: Any) -> Arguments:
    """Every argument has one element per data-parallel rank; all ranks of one replica get the same."""
    parts = data_parallel_parts(worker_group)
    return _spread(
        worker_group, parts, lambda rank: worker_group.get_megatron_rank_info(rank=rank).dp_rank, args, kwargs
    )


def collect_compute(worker_group: Any, output: list) -> list:
    """Answers of tensor rank 0 on the last pipeline stage, one per data-parallel rank and in their order."""
    last_stage = worker_group.get_megatron_global_info().pp_size - 1
    infos = [worker_group.get_megatron_rank_info(rank=rank) for rank in range(worker_group.world_size)]
    chosen = [
        (info.dp_rank, rank)
        for rank, info in enumerate(infos)
        if info.tp_rank == 0 and info.pp_rank == last_stage and info.cp_rank == 0
    ]
    return [output[rank] for _, rank in sorted(chosen)]


def dispatch_pp_as_dp(worker_group: Any, *args: Any, **kwargs: Any) -> Arguments:
    """One element per (data, context, pipeline) rank, pipeline rank fastest; tensor ranks get the same."""
    parts = pipeline_data_parallel_parts(worker_group)
    return _spread(worker_group, parts, lambda rank: _part_of_pipeline_rank(worker_group, rank), args, kwargs)


def collect_pp_as_dp(worker_group: Any, output: list) -> list:
    """Answers of tensor rank 0, in the order of :func:`dispatch_pp_as_dp`."""
    ranks = range(worker_group.world_size)
    chosen = [rank for rank in ranks if worker_group.get_megatron_rank_info(rank=rank).tp_rank == 0]
    return [output[rank] for rank in sorted(chosen, key=lambda rank: _part_of_pipeline_rank(worker_group, rank))]


def collect_pp_only(worker_group: Any, output: list) -> list:
    """One answer per pipeline stage, from its first tensor, data and context rank."""
    infos = [worker_group.get_megatron_rank_info(rank=rank) for rank in range(worker_group.world_size)]
    chosen = [
        (info.pp_rank, rank)
        for rank, info in enumerate(infos)
        if info.tp_rank == 0 and info.dp_rank == 0 and info.cp_rank == 0
    ]
    return [output[rank] for _, rank in sorted(chosen)]


def cut_rows(dispatch_fn: Callable[..., Arguments], parts: Callable[[Any], int]) -> Callable[..., Arguments]:
    """``dispatch_fn`` for arguments that are whole DataProtos: cut them into ``parts(group)`` first."""

    def dispatch(worker_group: Any, *args: Any, **kwargs: Any) -> Arguments:
        split_args, split_kwargs = _split_args_kwargs_data_proto(parts(worker_group), *args, **kwargs)
        return dispatch_fn(worker_group, *split_args, **split_kwargs)

    return dispatch


def join_rows(collect_fn: Callable[[Any, list], list]) -> Callable[[Any, list], DataProto | DataProtoFuture]:
    """``collect_fn`` followed by joining the answers' rows."""

    def collect(worker_group: Any, output: list) -> DataProto | DataProtoFuture:
        return _concat_data_proto_or_future(collect_fn(worker_group, output))

    return collect
