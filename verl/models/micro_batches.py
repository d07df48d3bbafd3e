"""Cutting rows into micro-batches that fit a token budget or hold so many rows."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def split_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of ``lengths`` in groups whose sums stay within ``budget``, few and with sums close to each other.

    As many groups as filling one after the other takes (best fit decreasing, longest rows first), and then, where that
    is possible, rows dealt so that the sums differ little: the largest decides how much memory is needed. A row longer
    than the budget gets a group of its own: it has to run somewhere. Groups and their members come out in order of
    their smallest index.

    >>> split_by_tokens([5, 3, 4, 2], budget=7)
    [[0, 3], [1, 2]]
    >>> split_by_tokens([4, 2, 2, 2], budget=8)
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
    even = _deal(lengths, len(groups), len(lengths))
    if all(sum(lengths[i] for i in group) <= budget for group in even):
        groups = even
    return _in_order(groups)


def split_by_rows(count: int, rows: int) -> list[list[int]]:
    """``range(count)`` in consecutive groups of at most ``rows``."""
    if rows <= 0:
        raise ValueError(f"a micro-batch needs at least one row, got {rows}")
    return [list(range(start, min(start + rows, count))) for start in range(0, count, rows)]


def split_evenly(lengths: Sequence[int], rows: int) -> list[list[int]]:
    """Indices of ``lengths`` in as few groups of at most ``rows`` as there can be, with sums close to each other.

    Ranks wait for each other in every micro-batch, and the largest one decides how much memory all may use: groups of
    neighbours of a batch in random order would differ. Longest rows first, each into the group with the smallest sum
    that has room. Groups and their members come out in order of their smallest index.

    >>> split_evenly([5, 3, 4, 2], rows=2)
    [[0, 3], [1, 2]]
    """
    if rows <= 0:
        raise ValueError(f"a micro-batch needs at least one row, got {rows}")
    return _in_order(_deal(lengths, -(-len(lengths) // rows), rows))


def _deal(lengths: Sequence[int], count: int, rows: int) -> list[list[int]]:
    """Indices of ``lengths`` in ``count`` groups of at most ``rows``: longest first, each into the smallest sum."""
    groups: list[list[int]] = [[] for _ in range(count)]
    open_groups = [(0, number) for number in range(count)]  # a heap of (sum, group) of those with room
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        total, number = heapq.heappop(open_groups)
        groups[number].append(index)
        if len(groups[number]) < rows:
            heapq.heappush(open_groups, (total + lengths[index], number))
    return groups


def _in_order(groups: list[list[int]]) -> list[list[int]]:
    return sorted((sorted(group) for group in groups), key=lambda group: group[0])
