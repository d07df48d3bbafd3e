"""Many values of a metric into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["reduce_metrics"]


def reduce_metrics(metrics: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """One number for each list of numbers.

    A key that contains ``max`` gives the largest, one that contains ``min`` the smallest, every other the mean.
    Keys without any value are left out.
    """
    reduced: dict[str, float] = {}
    for key, values in metrics.items():
        if np.size(values) == 0:
            continue
        combine = np.max if "max" in key else np.min if "min" in key else np.mean
        reduced[key] = float(combine(values))
    return reduced
