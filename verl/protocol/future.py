"""Rows that workers are still computing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import ray

from verl.protocol.data_proto import DataProto

__all__ = ["DataProtoFuture"]


def _pick_chunk(data: DataProto, index: int, chunks: int) -> DataProto:
    return data.chunk(chunks=chunks)[index]


@dataclass
class DataProtoFuture:
    """Rows that workers are still computing: one Ray reference per worker.

    It can be handed to another worker group, whose workers then wait for the references themselves; the driver never
    sees the data.
    """

    collect_fn: Callable[[list[DataProto]], DataProto]
    futures: list[ray.ObjectRef]
    dispatch_fn: Callable[[DataProto], DataProto] | None = None

    @staticmethod
    def concat(data: list[ray.ObjectRef]) -> DataProtoFuture:
        """The rows of all references, in order."""
        return DataProtoFuture(collect_fn=DataProto.concat, futures=data)

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """``chunks`` futures, each for one part of the rows."""
        return [
            DataProtoFuture(self.collect_fn, self.futures, partial(_pick_chunk, index=index, chunks=chunks))
            for index in range(chunks)
        ]

    def get(self, timeout: float | None = None) -> DataProto:
        """Wait (at most ``timeout`` seconds) for all parts and join them."""
        parts = ray.get(self.futures, timeout=timeout)
        for part in parts:
            assert isinstance(part, DataProto), f"a worker returned {type(part).__name__} where DataProto was expected"
        rows = self.collect_fn(parts)
        return rows if self.dispatch_fn is None else self.dispatch_fn(rows)
