"""Completing rows to a number that divides, and dropping what was added."""

from __future__ import annotations

import logging

import numpy as np

from verl.protocol.data_proto import DataProto

__all__ = ["pad_dataproto_to_divisor", "unpad_dataproto"]

logger = logging.getLogger(__name__)


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append rows, taken in turn from the start, until the length divides by ``size_divisor``.

    Returns the padded rows and how many were added (see :func:`unpad_dataproto`). Three rows and a divisor of seven
    give rows 0, 1, 2, 0, 1, 2, 0.
    """
    assert isinstance(data, DataProto), f"expected DataProto, got {type(data).__name__}"
    pad_size = -len(data) % size_divisor
    if len(data) == 0:
        logger.warning("no rows to pad: the DataProto is empty and stays so")
        return data, 0
    if pad_size == 0:
        return data, 0
    return data.select_idxs(np.arange(len(data) + pad_size) % len(data)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last ``pad_size`` rows."""
    return data[: len(data) - pad_size] if pad_size else data
