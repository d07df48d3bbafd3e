"""Mini-batches of rows, by a ``torch.utils.data.DataLoader``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from verl.protocol.data_proto import DataProto, DataProtoItem

__all__ = ["iterate_mini_batches"]


def iterate_mini_batches(
    data: DataProto,
    mini_batch_size: int,
    epochs: int,
    seed: int | None = None,
    dataloader_kwargs: dict[str, Any] | None = None,
) -> Iterator[DataProto]:
    """See :meth:`verl.protocol.DataProto.make_iterator`."""
    assert len(data) % mini_batch_size == 0, f"{len(data)} rows do not divide by mini_batch_size={mini_batch_size}"
    assert dataloader_kwargs is None or isinstance(dataloader_kwargs, dict), "dataloader_kwargs is a dict"
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    options = {"collate_fn": _same, "generator": generator, **(dataloader_kwargs or {})}
    loader = DataLoader(_RowDataset(data), batch_size=mini_batch_size, **options)

    def mini_batches() -> Iterator[DataProto]:
        for _ in range(epochs):
            for rows in loader:
                rows.meta_info = data.meta_info
                yield rows

    return mini_batches()


class _RowDataset(Dataset):
    """Rows for a ``DataLoader``: a whole mini-batch is picked at once."""

    def __init__(self, rows: DataProto) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> DataProtoItem:
        return self._rows[index]

    def __getitems__(self, indices: list[int]) -> DataProto:
        return self._rows.select_idxs(indices)


def _same(rows: DataProto) -> DataProto:
    return rows
