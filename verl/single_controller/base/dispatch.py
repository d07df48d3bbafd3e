"""The dispatch and collect functions behind :class:`verl.single_controller.base.decorator.Dispatch`.

``dispatch_fn(group, *args, **kwargs)`` returns the arguments with one list element per worker;
``collect_fn(group, output)`` makes one result of the answers, given in rank order.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import ray

from verl.single_controller.base.row_types import is_rows, is_rows_to_come

if TYPE_CHECKING:
    from verl.protocol import DataProto, DataProtoFuture
    from verl.single_controller.base.worker_group import WorkerGroup

Arguments = tuple[tuple, dict]


def _map_arguments(fn: Callable[[Any], Any], args: tuple, kwargs: dict) -> tuple[list, dict]:
    return [fn(arg) for arg in args], {key: fn(value) for key, value in kwargs.items()}


def _split_args_kwargs_data_proto(chunks: int, *args: Any, **kwargs: Any) -> tuple[list, dict]:
    """Cut every argument, which must be a DataProto or a future of one, into ``chunks`` parts."""

    def split(value: Any) -> list:
        assert is_rows(value) or is_rows_to_come(value), f"{type(value).__name__} cannot be cut over the workers"
        return value.chunk(chunks=chunks)

    return _map_arguments(split, args, kwargs)


def _split_args_kwargs_data_proto_with_auto_padding(chunks: int, *args: Any, **kwargs: Any) -> tuple[list, dict]:
    """Like :func:`_split_args_kwargs_data_proto`, completing rows that allow it to a multiple of ``chunks``.

    The caller's rows stay as they are: a shallow copy is padded. How many rows were added is left under
    ``_padding_size_key`` of the keyword arguments. All padded arguments must have the same number of rows.
    """
    lengths = {
        len(value) for value in (*args, *kwargs.values()) if is_rows(value) and value.is_padding_enabled()
    }
    assert len(lengths) <= 1, f"arguments that may be padded must be equally long, got {sorted(lengths)} rows"
    length = lengths.pop() if lengths else 0
    padding_size = -length % chunks

    def split(value: Any) -> list:
        assert is_rows(value) or is_rows_to_come(value), f"{type(value).__name__} cannot be cut over the workers"
        if padding_size and is_rows(value) and value.is_padding_enabled():
            value = value.slice()
            value.padding(padding_size=padding_size, padding_candidate="last")
        return value.chunk(chunks=chunks)

    split_args, split_kwargs = _map_arguments(split, args, kwargs)
    if padding_size:
        from verl.protocol import _padding_size_key

        split_kwargs[_padding_size_key] = padding_size
    return split_args, split_kwargs


def dispatch_one_to_all(worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> Arguments:
    """Every worker gets every argument."""
    split_args, split_kwargs = _map_arguments(lambda value: [value] * worker_group.world_size, args, kwargs)
    return tuple(split_args), split_kwargs


def dispatch_all_to_all(worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> Arguments:
    """Arguments go as they are (the group hands out lists of ``world_size`` elements one by one)."""
    return args, kwargs


def collect_all_to_all(worker_group: WorkerGroup, output: list) -> list:
    """Answers as they are: one per worker, in rank order."""
    return output


def dummy_direct_rollout_call(worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> Arguments:
    """The method is for calls between workers and cannot be called from the driver."""
    raise NotImplementedError("methods of mode DIRECT_ROLLOUT_METHOD are called on the worker itself, not on its group")


def dispatch_dp_compute(worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> Arguments:
    """Every argument is a list of ``world_size`` elements, one for each worker."""
    for value in (*args, *kwargs.values()):
        assert isinstance(value, (tuple, list)) and len(value) == worker_group.world_size, (
            f"every argument must be a list of {worker_group.world_size} elements, one for each worker"
        )
    split_args, split_kwargs = _map_arguments(list, args, kwargs)
    return tuple(split_args), split_kwargs


def collect_dp_compute(worker_group: WorkerGroup, output: list) -> list:
    """One answer per worker, in rank order."""
    assert len(output) == worker_group.world_size, f"{len(output)} answers from {worker_group.world_size} workers"
    return output


def dispatch_dp_compute_data_proto(worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> Arguments:
    """Rows are cut into one part per worker, after padding where they allow it."""
    split_args, split_kwargs = _split_args_kwargs_data_proto_with_auto_padding(worker_group.world_size, *args, **kwargs)
    return tuple(split_args), split_kwargs


def dispatch_dp_compute_data_proto_with_func(worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> Arguments:
    """The first argument is a function for every worker; the others are rows to cut."""
    assert args and isinstance(args[0], FunctionType), "the first argument must be a function"
    split_args, split_kwargs = _split_args_kwargs_data_proto(worker_group.world_size, *args[1:], **kwargs)
    return ([args[0]] * worker_group.world_size, *split_args), split_kwargs


def _concat_data_proto_or_future(output: list) -> DataProto | DataProtoFuture:
    kinds = {type(part) for part in output}
    assert len(kinds) == 1, f"workers answered with different types: {sorted(kind.__name__ for kind in kinds)}"
    if is_rows(output[0]):
        return type(output[0]).concat(output)
    if isinstance(output[0], ray.ObjectRef):
        from verl.protocol import DataProtoFuture

        return DataProtoFuture.concat(output)
    raise AssertionError(f"workers must answer with DataProto, got {type(output[0]).__name__}")


def collect_dp_compute_data_proto(worker_group: WorkerGroup, output: list) -> DataProto | DataProtoFuture:
    """The rows of all workers in rank order; ``meta_info`` is that of rank 0."""
    return _concat_data_proto_or_future(collect_dp_compute(worker_group, output))
