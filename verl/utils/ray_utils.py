"""Ray's object store."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

__all__ = ["parallel_put"]

_MAX_THREADS = 16


def parallel_put(data_list: Sequence[Any], max_workers: int | None = None) -> list[ray.ObjectRef]:
    """Put every element into the object store from several threads; references in the order of the elements."""
    assert len(data_list) > 0, "there is nothing to put"
    workers = max_workers if max_workers is not None else min(len(data_list), _MAX_THREADS)
    with ThreadPoolExecutor(max_workers=workers) as executor:
        return list(executor.map(ray.put, data_list))
