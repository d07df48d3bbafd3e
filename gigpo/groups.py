"""Statistics of a value within groups of rows, for all rows at once.

Group-relative estimators (GRPO, RLOO, GiGPO, HGPO) all ask the same two questions of a row: how far is its value from
its group's mean, and how wide is the group. Groups come as dense integer codes, so that both are a few `bincount`s.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GroupStatistics:
    """For every row, its group's statistics. All arrays (rows,).

    Example: values [10, 0, 7], groups [0, 0, 1] give size [2, 2, 1], mean [5, 5, 7], deviation [5, -5, 0],
    std [7.07, 7.07, 0].
    """

    size: np.ndarray  # int64: rows of the group that count
    mean: np.ndarray  # float64
    deviation: np.ndarray  # float64: value - mean; exactly 0 where all values of the group are equal
    std: np.ndarray  # float64: unbiased unless asked otherwise; 0 for fewer than two rows


def factorize(keys: Iterable[Hashable]) -> np.ndarray:
    """Dense int64 codes (rows,) in order of first appearance; equal keys get equal codes."""
    codes: dict[Hashable, int] = {}
    return np.fromiter((codes.setdefault(key, len(codes)) for key in keys), dtype=np.int64)


def combine(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Dense codes of the pairs (first, second), both (rows,) non-negative int64."""
    if first.size == 0:
        return first
    pairs = first * (int(second.max()) + 1) + second
    return np.unique(pairs, return_inverse=True)[1].astype(np.int64)


def first_of_each(codes: np.ndarray, order: np.ndarray | None = None) -> np.ndarray:
    """(rows,) bool: the row that comes first among those with its code, by `order` (rows,) or else by position."""
    priority = np.arange(codes.size) if order is None else np.asarray(order)
    by_code = np.lexsort((np.arange(codes.size), priority, codes))
    is_first = np.zeros(codes.size, dtype=bool)
    if codes.size:
        starts = np.flatnonzero(np.diff(codes[by_code], prepend=-1))
        is_first[by_code[starts]] = True
    return is_first


def group_statistics(
    values: np.ndarray, groups: np.ndarray, members: np.ndarray | None = None, unbiased: bool = True
) -> GroupStatistics:
    """Mean, deviation and standard deviation of `values` within `groups`.

    Args:
        values: (rows,) float.
        groups: (rows,) dense codes 0 … number of groups - 1.
        members: (rows,) bool, the rows that enter the statistics; None = all. The other rows are compared to them all
            the same.
        unbiased: divide the squared deviations by n - 1 rather than n.
    """
    values = np.asarray(values, dtype=np.float64)
    members = np.ones(values.size, dtype=bool) if members is None else members
    count = int(groups.max()) + 1 if groups.size else 0
    rows = np.flatnonzero(members)
    size = np.bincount(groups[rows], minlength=count)

    # Measured from one member's value instead of from 0, so that a group of equal values deviates by exactly nothing.
    origin = np.zeros(count)
    origin[groups[rows[::-1]]] = values[rows[::-1]]
    shifted = values - origin[groups]
    mean = np.bincount(groups[rows], weights=shifted[rows], minlength=count) / np.maximum(size, 1)
    deviation = shifted - mean[groups]
    squares = np.bincount(groups[rows], weights=deviation[rows] ** 2, minlength=count)
    variance = np.where(size > 1, squares / np.maximum(size - int(unbiased), 1), 0.0)
    return GroupStatistics(
        size=size[groups],
        mean=(origin + mean)[groups],
        deviation=deviation,
        std=np.sqrt(variance)[groups],
    )
