"""What :class:`verl.protocol.DataProto` needs to know about NumPy columns.

A column is an array whose first dimension counts rows. Ragged data (token ids of their true length, images, dicts) is
a one-dimensional *object* array; NumPy would silently turn equally long elements into a second dimension, so object
columns are only ever made here.

The second half is the wire format. Through Ray a column of ragged token ids costs one buffer (not one pickle per row)
and every numeric buffer goes out of band (pickle protocol 5), i.e. straight into shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["columns_equal", "object_array", "pack_column", "pack_tensor", "unpack_column", "unpack_tensor"]


def object_array(values: Iterable[Any]) -> np.ndarray:
    """A one-dimensional object array holding ``values`` as they are, whatever their shapes."""
    values = list(values)
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = value
    return array


def columns_equal(left: np.ndarray, right: np.ndarray) -> bool:
    """Same shape, type and values; NaN equals NaN, and elements of object columns are compared in depth."""
    if left.shape != right.shape:
        return False
    if left.dtype == object or right.dtype == object:
        return all(_values_equal(a, b) for a, b in zip(left.ravel(), right.ravel(), strict=True))
    if left.dtype != right.dtype and not (left.dtype.kind in "US" and left.dtype.kind == right.dtype.kind):
        return False
    return bool(np.array_equal(left, right, equal_nan=left.dtype.kind in "fc"))


def _values_equal(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return isinstance(left, np.ndarray) and isinstance(right, np.ndarray) and columns_equal(left, right)
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_values_equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_values_equal, left, right))
    if isinstance(left, (float, np.floating)) and isinstance(right, (float, np.floating)):
        return bool(left == right or (np.isnan(left) and np.isnan(right)))
    return bool(left == right)


@dataclass
class _PackedRagged:
    """An object column of equally typed arrays: all elements end to end, and their shapes."""

    flat: np.ndarray  # (sum of element sizes,)
    shapes: list[tuple[int, ...]]


@dataclass
class _PackedTensor:
    """A dense tensor as bytes that pickle can send out of band (bfloat16 and float8 have no NumPy counterpart)."""

    data: np.ndarray  # (bytes,) uint8
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def pack_column(column: np.ndarray) -> np.ndarray | _PackedRagged:
    """The cheapest form of a column to send; undone by :func:`unpack_column`."""
    if column.dtype != object or column.ndim != 1 or len(column) == 0:
        return column
    first = column[0]
    if type(first) is not np.ndarray or first.dtype.kind not in "biufc":
        return column
    if any(type(value) is not np.ndarray or value.dtype != first.dtype for value in column):
        return column
    flat = np.concatenate([value.ravel() for value in column])
    return _PackedRagged(flat=flat, shapes=[value.shape for value in column])


def unpack_column(packed: np.ndarray | _PackedRagged) -> np.ndarray:
    """Undo :func:`pack_column`. The result is writable; ragged elements are views of one buffer."""
    if isinstance(packed, np.ndarray):
        return packed if packed.flags.writeable else packed.copy()
    flat = packed.flat if packed.flat.flags.writeable else packed.flat.copy()
    column = np.empty(len(packed.shapes), dtype=object)
    start = 0
    for index, shape in enumerate(packed.shapes):
        size = math.prod(shape)
        column[index] = flat[start : start + size].reshape(shape)
        start += size
    return column


def pack_tensor(value: Any) -> Any:
    """A dense tensor as :class:`_PackedTensor`; anything else (nested tensors, subclasses) as it is."""
    if type(value) is not torch.Tensor or value.layout != torch.strided or value.is_quantized or value.is_meta:
        return value
    host = value.detach().cpu().contiguous()
    data = host.reshape(-1).view(torch.uint8).numpy() if host.numel() else np.empty(0, dtype=np.uint8)
    return _PackedTensor(data=data, shape=tuple(value.shape), dtype=value.dtype, device=str(value.device))


def unpack_tensor(packed: Any) -> Any:
    """Undo :func:`pack_tensor`, on the device it came from when this process has it, else on the CPU."""
    if not isinstance(packed, _PackedTensor):
        return packed
    if packed.data.size == 0:
        tensor = torch.empty(packed.shape, dtype=packed.dtype)
    else:
        # Buffers out of Ray's shared memory are read-only; an in-place operation on them would crash the process.
        data = packed.data if packed.data.flags.writeable else packed.data.copy()
        tensor = torch.from_numpy(data).view(packed.dtype).reshape(packed.shape)
    return tensor.to(packed.device) if _device_exists(packed.device) else tensor


def _device_exists(name: str) -> bool:
    device = torch.device(name)
    if device.type == "cpu":
        return True
    module = getattr(torch, device.type, None)
    return module is not None and module.is_available() and (device.index or 0) < module.device_count()
