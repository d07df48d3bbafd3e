"""Operations on rows and their columns that stand outside :class:`verl.protocol.DataProto`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

from verl.utils.row_arrays import columns_equal, pack_column, unpack_column

if TYPE_CHECKING:
    from verl.protocol.data_proto import DataProto

__all__ = [
    "all_gather_data_proto",
    "column_bytes",
    "fold_batch_dim",
    "list_of_dict_to_dict_of_list",
    "unfold_batch_dim",
    "unfold_column_chunks",
    "union_numpy_dict",
    "union_tensor_dict",
]


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Add the tensors of the second to the first; what is in both must be equal."""
    assert tensor_dict1.batch_size == tensor_dict2.batch_size, (
        f"batch sizes differ: {tuple(tensor_dict1.batch_size)} and {tuple(tensor_dict2.batch_size)}"
    )
    for key, tensor in tensor_dict2.items():
        if key in tensor_dict1.keys():
            assert tensor_dict1[key].equal(tensor), f"both sides have a tensor {key!r} and the values differ"
        else:
            tensor_dict1[key] = tensor
    return tensor_dict1


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add the columns of the second to the first; what is in both must be equal (NaN equals NaN)."""
    for key, column in tensor_dict2.items():
        if key in tensor_dict1:
            for value in (column, tensor_dict1[key]):
                assert isinstance(value, np.ndarray), f"{key!r} is a {type(value).__name__}, not a np.ndarray"
            assert columns_equal(tensor_dict1[key], column), f"both sides have a column {key!r} and the values differ"
        tensor_dict1[key] = column
    return tensor_dict1


def list_of_dict_to_dict_of_list(list_of_dict: list[dict[str, Any]]) -> dict[str, list]:
    """Transpose: one list per key of the first dictionary; all must have the same keys."""
    if not list_of_dict:
        return {}
    output: dict[str, list] = {key: [] for key in list_of_dict[0]}
    for data in list_of_dict:
        assert data.keys() == output.keys(), f"keys differ: {set(data) ^ set(output)}"
        for key, value in data.items():
            output[key].append(value)
    return output


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """(B, …) → (new_batch_size, B / new_batch_size, …) for every column."""
    rows = len(data)
    assert rows % new_batch_size == 0, f"{rows} rows do not fold into {new_batch_size}"
    batch = None
    if data.batch is not None:
        tensors = {k: v.reshape(new_batch_size, rows // new_batch_size, *v.shape[1:]) for k, v in data.batch.items()}
        batch = TensorDict(source=tensors, batch_size=(new_batch_size,), device=data.batch.device)
    columns = {
        key: column.reshape(new_batch_size, rows // new_batch_size, *column.shape[1:])
        for key, column in data.non_tensor_batch.items()
    }
    return type(data)(batch=batch, non_tensor_batch=columns, meta_info=data.meta_info)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """(A, B, …) → (A · B, …): the inverse of :func:`fold_batch_dim`, over the first ``batch_dims`` dimensions."""
    batch = None
    if data.batch is not None:
        tensors = {key: tensor.reshape(-1, *tensor.shape[batch_dims:]) for key, tensor in data.batch.items()}
        rows = next(iter(tensors.values())).shape[0]
        batch = TensorDict(source=tensors, batch_size=(rows,), device=data.batch.device)
    columns = {key: column.reshape(-1, *column.shape[batch_dims:]) for key, column in data.non_tensor_batch.items()}
    return type(data)(batch=batch, non_tensor_batch=columns, meta_info=data.meta_info)


def unfold_column_chunks(data: DataProto, n_split: int, split_keys: Sequence[str] | None) -> DataProto:
    """See :meth:`verl.protocol.DataProto.unfold_column_chunks`."""

    def unfold(key: str, value: Any, chosen: bool) -> Any:
        if chosen:
            assert value.ndim > 1 and value.shape[1] % n_split == 0, (
                f"{key!r} {value.shape} is not cut by {n_split}"
            )
            return value.reshape(value.shape[0] * n_split, value.shape[1] // n_split, *value.shape[2:])
        is_tensor = isinstance(value, torch.Tensor)
        return value.repeat_interleave(n_split, dim=0) if is_tensor else np.repeat(value, n_split, axis=0)

    batch = None
    if data.batch is not None:
        chosen = [k for k, v in data.batch.items() if (v.ndim > 1 if split_keys is None else k in split_keys)]
        tensors = {key: unfold(key, tensor, key in chosen) for key, tensor in data.batch.items()}
        batch = TensorDict(source=tensors, batch_size=(len(data) * n_split,), device=data.batch.device)
    columns = {
        key: unfold(key, column, split_keys is not None and key in split_keys)
        for key, column in data.non_tensor_batch.items()
    }
    return type(data)(batch=batch, non_tensor_batch=columns, meta_info=data.meta_info)


def all_gather_data_proto(data: DataProto, process_group: Any) -> None:
    """Give every rank of the group the rows of all its ranks, in rank order (in place; equal shapes on all ranks)."""
    world_size = torch.distributed.get_world_size(group=process_group)
    if data.batch is not None:
        on_gpu = torch.distributed.get_backend(process_group) == "nccl"
        gathered: dict[str, torch.Tensor] = {}
        for key in sorted(data.batch.keys()):
            tensor = data.batch[key]
            local = (tensor.to(torch.cuda.current_device()) if on_gpu else tensor).contiguous()
            parts = [torch.empty_like(local) for _ in range(world_size)]
            torch.distributed.all_gather(parts, local, group=process_group)
            gathered[key] = torch.cat(parts, dim=0).to(tensor.device)
        rows = data.batch.batch_size[0] * world_size
        data.batch = TensorDict(source=gathered, batch_size=(rows,), device=data.batch.device)
    if data.non_tensor_batch:
        everyone: list[Any] = [None] * world_size
        packed = {key: pack_column(column) for key, column in data.non_tensor_batch.items()}
        torch.distributed.all_gather_object(everyone, packed, group=process_group)
        data.non_tensor_batch = {
            key: np.concatenate([unpack_column(part[key]) for part in everyone], axis=0) for key in packed
        }
    data.check_consistency()


def column_bytes(column: np.ndarray) -> int:
    """Bytes of a column: the arrays in an object column count, other Python objects only as references."""
    if column.dtype != object:
        return column.nbytes
    return column.nbytes + sum(value.nbytes for value in column.ravel() if isinstance(value, np.ndarray))
