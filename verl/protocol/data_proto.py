"""DataProto: a table of rows."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy as deep_copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensordict
import torch
from tensordict import TensorDict

from verl.protocol.auto_padding import AUTO_PADDING_META_KEY, DataProtoConfig
from verl.protocol.mini_batches import iterate_mini_batches
from verl.protocol.row_ops import column_bytes, unfold_column_chunks, union_numpy_dict, union_tensor_dict
from verl.utils.py_functional import union_two_dict
from verl.utils.row_arrays import object_array, pack_column, pack_tensor, unpack_column, unpack_tensor

__all__ = ["DataProto", "DataProtoItem", "collate_fn"]

tensordict.set_lazy_legacy(False).set()


@dataclass
class DataProtoItem:
    """One row: tensors without their batch dimension and single values out of the NumPy columns."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataProto:
    """N rows of tensors, NumPy columns and shared facts; see the module's docstring."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_consistency()

    def check_consistency(self) -> None:
        """Assert that tensors have one batch dimension and that every column is an array with as many rows."""
        if self.batch is not None:
            assert len(self.batch.batch_size) == 1, f"expected one batch dimension, got {tuple(self.batch.batch_size)}"
        for key, column in (self.non_tensor_batch or {}).items():
            assert isinstance(column, np.ndarray), f"non-tensor {key!r} is a {type(column).__name__}, not a np.ndarray"
            if self.batch is not None:
                rows = self.batch.batch_size[0]
                shape = column.shape
                assert shape and shape[0] == rows, f"non-tensor {key!r} has shape {shape}, the batch has {rows} rows"

    # ------------------------------------------------------------------------------------------------ construction

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: dict[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """Build rows out of tensors and columns.

        Values of ``non_tensors`` that are not arrays become one-dimensional object arrays, in the caller's dictionary
        as well. ``auto_padding`` allows dispatch to pad these rows to a multiple of the number of workers.
        """
        assert num_batch_dims > 0, "num_batch_dims must be at least 1"
        if non_tensors is not None:
            assert num_batch_dims == 1, "only one batch dimension is possible together with non-tensors"
        tensors = {} if tensors is None else tensors
        non_tensors = {} if non_tensors is None else non_tensors
        meta_info = {} if meta_info is None else meta_info

        batch_size: torch.Size | None = None
        for key, tensor in tensors.items():
            leading = tensor.shape[:num_batch_dims]
            batch_size = leading if batch_size is None else batch_size
            assert leading == batch_size, (
                f"tensor {key!r} starts with {tuple(leading)}, others with {tuple(batch_size)}"
            )
        for key, column in non_tensors.items():
            if not isinstance(column, np.ndarray):
                non_tensors[key] = object_array(column)
        if auto_padding:
            meta_info[AUTO_PADDING_META_KEY] = True
        batch = TensorDict(source=dict(tensors), batch_size=batch_size) if tensors else None
        return cls(batch=batch, non_tensor_batch=non_tensors, meta_info=meta_info)

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, torch.Tensor | np.ndarray], meta_info: dict | None = None, auto_padding: bool = False
    ) -> DataProto:
        """Build rows out of one dictionary of tensors and arrays; ``ValueError`` for any other type of value."""
        tensors: dict[str, torch.Tensor] = {}
        non_tensors: dict[str, np.ndarray] = {}
        for key, value in data.items():
            if isinstance(value, torch.Tensor):
                tensors[key] = value
            elif isinstance(value, np.ndarray):
                non_tensors[key] = value
            else:
                raise ValueError(f"{key!r} is a {type(value).__name__}; give a torch.Tensor or a np.ndarray")
        return cls.from_dict(tensors, non_tensors, meta_info=meta_info, auto_padding=auto_padding)

    @staticmethod
    def concat(data: list[DataProto]) -> DataProto:
        """All rows of ``data`` in order. ``meta_info`` and the type are those of the first element."""
        first = data[0]
        batches = [part.batch for part in data if part.batch is not None]
        assert len(batches) in (0, len(data)), "some parts have tensors and some have none"
        batch = torch.cat(batches, dim=0) if batches else None
        keys = first.non_tensor_batch.keys()
        for part in data[1:]:
            assert part.non_tensor_batch.keys() == keys, f"columns differ: {set(part.non_tensor_batch) ^ set(keys)}"
        columns = {key: np.concatenate([part.non_tensor_batch[key] for part in data], axis=0) for key in keys}
        return type(first)(batch=batch, non_tensor_batch=columns, meta_info=first.meta_info)

    # ----------------------------------------------------------------------------------------------------- reading

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        if self.non_tensor_batch:
            return len(next(iter(self.non_tensor_batch.values())))
        return 0

    def __getitem__(self, item: Any) -> DataProto | DataProtoItem:
        """Rows for a slice, list, array or tensor of indices (or mask); a :class:`DataProtoItem` for an integer."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, (list, np.ndarray, torch.Tensor)):
            return self.select_idxs(item)
        if isinstance(item, (int, np.integer)):
            batch = None if self.batch is None else self.batch[int(item)]
            columns = {key: column[item] for key, column in self.non_tensor_batch.items()}
            return DataProtoItem(batch=batch, non_tensor_batch=columns, meta_info=self.meta_info)
        raise TypeError(f"rows are indexed by int, slice, list, array or tensor, not by {type(item).__name__}")

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Rows ``start:end:step`` (views where the storage allows it); ``meta_info`` is shared."""
        rows = slice(start, end, step)
        batch = None if self.batch is None else self.batch[rows]
        columns = {key: column[rows] for key, column in self.non_tensor_batch.items()}
        return type(self)(batch=batch, non_tensor_batch=columns, meta_info=self.meta_info)

    def select_idxs(self, idxs: list | np.ndarray | torch.Tensor) -> DataProto:
        """Rows by index (negative counts from the end) or by boolean mask; ``meta_info`` is shared."""
        if isinstance(idxs, torch.Tensor):
            index = idxs.detach().cpu()
        else:
            index = torch.as_tensor(np.asarray(idxs) if len(idxs) else np.empty(0, dtype=np.int64))
        if index.dtype != torch.bool:
            index = index.to(torch.int64)
        if self.batch is None:
            batch = None
        else:
            rows = int(index.sum()) if index.dtype == torch.bool else index.shape[0]
            picked = {key: tensor[index.to(tensor.device)] for key, tensor in self.batch.items()}
            batch = TensorDict(source=picked, batch_size=(rows,), device=self.batch.device)
        index_np = index.numpy()
        columns = {key: column[index_np] for key, column in self.non_tensor_batch.items()}
        return type(self)(batch=batch, non_tensor_batch=columns, meta_info=self.meta_info)

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Some of the columns (``None`` keeps all).

        A missing tensor is a ``KeyError``; missing non-tensors and facts are skipped. ``deepcopy`` copies non-tensors
        and facts; tensors are always shared.
        """
        batch = self.batch
        if batch_keys is not None and batch is not None:
            batch = batch.select(*batch_keys)
        columns, meta_info = self.non_tensor_batch, self.meta_info
        if non_tensor_batch_keys is not None:
            columns = {key: column for key, column in columns.items() if key in non_tensor_batch_keys}
        if meta_info_keys is not None:
            meta_info = {key: value for key, value in meta_info.items() if key in meta_info_keys}
        if deepcopy:
            columns, meta_info = deep_copy(columns), deep_copy(meta_info)
        return type(self)(batch=batch, non_tensor_batch=columns, meta_info=meta_info)

    # ---------------------------------------------------------------------------------------------------- in place

    def to(self, device: torch.device | str | int) -> DataProto:
        """Move the tensors to ``device``; returns ``self``."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Take columns out of these rows and return them as their own rows; every key must be there."""
        for keys, there in (
            (batch_keys, self.batch.keys() if self.batch is not None else ()),
            (non_tensor_batch_keys, self.non_tensor_batch),
            (meta_info_keys, self.meta_info),
        ):
            missing = [key for key in keys or () if key not in there]
            assert not missing, f"cannot pop {missing}: there is only {sorted(there)}"
        tensors = {key: self.batch.pop(key) for key in batch_keys or ()}
        columns = {key: self.non_tensor_batch.pop(key) for key in non_tensor_batch_keys or ()}
        meta_info = {key: self.meta_info.pop(key) for key in meta_info_keys or ()}
        return DataProto.from_dict(tensors=tensors, non_tensors=columns, meta_info=meta_info)

    def rename(self, old_keys: str | list[str], new_keys: str | list[str]) -> DataProto:
        """Rename tensors; returns ``self``. ``TypeError`` for other types, ``ValueError`` for unequal lengths."""
        lists = []
        for keys in (old_keys, new_keys):
            if not isinstance(keys, (str, list)):
                raise TypeError(f"keys are a string or a list of strings, not {type(keys).__name__}")
            lists.append([keys] if isinstance(keys, str) else keys)
        old, new = lists
        if len(old) != len(new):
            raise ValueError(f"{len(old)} old keys and {len(new)} new keys; give as many of each")
        assert self.batch is not None, "there are no tensors to rename"
        missing = [key for key in old if key not in self.batch.keys()]
        assert not missing, f"cannot rename {missing}: there is only {sorted(self.batch.keys())}"
        # All are taken out before any is put back, so names may be swapped.
        tensors = [self.batch.pop(key) for key in old]
        for key, tensor in zip(new, tensors, strict=True):
            self.batch[key] = tensor
        return self

    def union(self, other: DataProto) -> DataProto:
        """Add the columns and facts of ``other``; returns ``self``. What is in both must be equal."""
        if self.batch is not None and other.batch is not None:
            self.batch = union_tensor_dict(self.batch, other.batch)
        elif self.batch is None:
            self.batch = other.batch
        self.non_tensor_batch = union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch)
        self.meta_info = union_two_dict(self.meta_info, other.meta_info)
        self.check_consistency()
        return self

    def reorder(self, indices: torch.Tensor) -> None:
        """Put row ``indices[i]`` at position ``i``."""
        picked = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = picked.batch, picked.non_tensor_batch

    def is_padding_enabled(self) -> bool:
        """Whether dispatch may pad these rows to a multiple of the number of workers."""
        return bool(self.meta_info.get(AUTO_PADDING_META_KEY, False)) or DataProtoConfig.auto_padding

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append ``padding_size`` copies of the first row (``padding_candidate="first"``) or of the last."""
        if padding_size == 0:
            return
        assert len(self) > 0, "there is no row to pad with"
        row = 0 if padding_candidate == "first" else len(self) - 1
        padded = self.select_idxs(np.concatenate([np.arange(len(self)), np.full(padding_size, row)]))
        self.batch, self.non_tensor_batch = padded.batch, padded.non_tensor_batch

    # ------------------------------------------------------------------------------------- splitting and repeating

    def chunk(self, chunks: int) -> list[DataProto]:
        """``chunks`` consecutive parts that share ``meta_info``.

        The rows must divide evenly unless padding is enabled; then all parts but the last have
        ``ceil(len / chunks)`` rows, and it is an error if that leaves fewer than ``chunks`` parts.
        """
        rows = len(self)
        if not self.is_padding_enabled():
            assert rows % chunks == 0, f"{rows} rows do not divide into {chunks} equal parts"
        size = max(1, -(-rows // chunks))
        parts = [self.slice(start, min(start + size, rows)) for start in range(0, rows, size)]
        if rows == 0:
            parts = [self.slice(0, 0) for _ in range(chunks)]
        assert len(parts) == chunks, f"{rows} rows in parts of {size} make {len(parts)} parts, not {chunks}"
        return parts

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Mini-batches of ``mini_batch_size`` rows, ``epochs`` times over; each carries this ``meta_info``.

        Rows keep their order unless ``dataloader_kwargs`` (for ``torch.utils.data.DataLoader``) asks for shuffling,
        which ``seed`` then makes reproducible.
        """
        return iterate_mini_batches(self, mini_batch_size, epochs, seed, dataloader_kwargs)

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Every row ``repeat_times`` times: a, a, b, b with ``interleave``, else a, b, a, b."""
        index = np.arange(len(self))
        return self.select_idxs(np.repeat(index, repeat_times) if interleave else np.tile(index, repeat_times))

    def sample_level_repeat(self, repeat_times: list | tuple | torch.Tensor | np.ndarray) -> DataProto:
        """Row ``i`` ``repeat_times[i]`` times."""
        counts = repeat_times.tolist() if isinstance(repeat_times, (torch.Tensor, np.ndarray)) else repeat_times
        assert isinstance(counts, (list, tuple)), f"repeat_times is a list, not {type(repeat_times).__name__}"
        assert all(isinstance(count, int) for count in counts), "repeat_times is one-dimensional and of whole numbers"
        assert len(counts) == len(self), f"{len(counts)} repeat counts for {len(self)} rows"
        return self.select_idxs(np.repeat(np.arange(len(self)), counts))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> DataProto:
        """Cut dimension 1 of the chosen columns into ``n_split`` rows each; the others are repeated to match.

        ``None`` chooses every tensor that has a dimension 1. A column of shape (N, L, …) becomes
        (N · n_split, L / n_split, …).
        """
        return unfold_column_chunks(self, n_split, split_keys)

    # --------------------------------------------------------------------------------------------- disk and wire

    def save_to_disk(self, filepath: str | Path) -> None:
        """Pickle these rows into a file."""
        with open(filepath, "wb") as file:
            pickle.dump(self, file, protocol=5)

    @staticmethod
    def load_from_disk(filepath: str | Path) -> DataProto:
        """Rows written by :meth:`save_to_disk`."""
        with open(filepath, "rb") as file:
            return pickle.load(file)

    def __getstate__(self) -> dict[str, Any]:
        batch = None
        if self.batch is not None:
            tensors = {key: pack_tensor(tensor) for key, tensor in self.batch.items()}
            batch = (tensors, tuple(self.batch.batch_size))
        columns = {key: pack_column(column) for key, column in (self.non_tensor_batch or {}).items()}
        return {"batch": batch, "non_tensor_batch": columns, "meta_info": self.meta_info}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.batch = None
        if state["batch"] is not None:
            packed, batch_size = state["batch"]
            tensors = {key: unpack_tensor(value) for key, value in packed.items()}
            self.batch = TensorDict(source=tensors, batch_size=batch_size)
        self.non_tensor_batch = {key: unpack_column(value) for key, value in state["non_tensor_batch"].items()}
        self.meta_info = state["meta_info"]

    def print_size(self, prefix: str = "") -> None:
        """Write the size of tensors and columns, in GiB, to standard output."""
        tensor_bytes = 0
        if self.batch is not None:
            tensor_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self.batch.values())
        array_bytes = sum(column_bytes(column) for column in self.non_tensor_batch.values())
        head = f"{prefix}, " if prefix else ""
        sys.stdout.write(
            f"{head}size of tensordict: {tensor_bytes / 2**30:.6f} GB, "
            f"size of non_tensor_batch: {array_bytes / 2**30:.6f} GB\n"
        )


def collate_fn(items: list[DataProtoItem]) -> DataProto:
    """Rows out of single rows: tensors are stacked, everything else becomes object columns."""
    tensors: dict[str, torch.Tensor] = {}
    if items[0].batch is not None:
        tensors = {key: torch.stack([item.batch[key] for item in items]) for key in items[0].batch.keys()}
    columns = {key: object_array(item.non_tensor_batch[key] for item in items) for key in items[0].non_tensor_batch}
    return DataProto.from_dict(tensors=tensors, non_tensors=columns)
