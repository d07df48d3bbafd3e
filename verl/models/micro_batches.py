"""Cutting rows into micro-batches that fit a token budget."""

from __future__ import annotations

from collections.abc import Sequence


def split_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of ``lengths`` in groups whose sums stay within ``budget``, few and of similar size.

    Longest rows first, each into the fullest group it fits (best fit decreasing). A row longer than the budget gets a
    group of its own: it has to run somewhere. Groups and their members come out in order of their smallest index.

    >>> split_by_tokens([5, 3, 4, 2], budget=7)
    [[0, 3], [1, 2]]
    """
    if budget <= 0:
        raise ValueError(f"the token budget of a micro-batch must be positive, got {budget}")
    groups: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [g for g, left in enumerate(room) if left >= lengths[index]]
        if fitting:
            best = min(fitting, key=lambda g: room[g])
        else:
            groups.append([])
            room.append(budget)
            best = len(groups) - 1
        groups[best].append(index)
        room[best] -= lengths[index]
    return sorted((sorted(group) for group in groups), key=lambda group: group[0])


def split_by_rows(count: int, rows: int) -> list[list[int]]:
    """``range(count)`` in consecutive groups of at most ``rows``."""
    if rows <= 0:
        raise ValueError(f"a micro-batch needs at least one row, got {rows}")
    return [list(range(start, min(start + rows, count))) for start in range(0, count, rows)]
