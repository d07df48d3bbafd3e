"""Dividing rows of different lengths: equal work for every rank, and micro-batches within a token budget.

The balanced partition is the largest differencing method (N. Karmarkar and R. M. Karp, "The Differencing Method of Set
Partitioning", 1982) for k sets: the two partial solutions that differ most are joined, large sets with small ones,
until one is left.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "ceildiv",
    "get_reverse_idx",
    "get_seqlen_balanced_partitions",
    "greedy_partition",
    "karmarkar_karp",
    "log_seqlen_unbalance",
    "partition_by_token_budget",
    "rearrange_micro_batches",
    "roundup_divisible",
]


def ceildiv(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(a // -b)


def roundup_divisible(a: int, b: int) -> int:
    """The smallest multiple of ``b`` that is not below ``a``."""
    return ceildiv(a, b) * b


# A set of a partial solution: (sum, size, first member, members). Sets are disjoint, so the first member decides every
# tie and the members, a tree of joins that costs nothing to grow, are never compared.
_EMPTY_SET = (0, 0, -1, None)


class _Solution:
    """A partial solution: k sets, the heaviest first."""

    __slots__ = ("sets", "spread")

    def __init__(self, sets: list[tuple]) -> None:
        self.sets = sorted(sets, reverse=True)
        self.spread = self.sets[0][0] - self.sets[-1][0]

    def __lt__(self, other: _Solution) -> bool:
        """Order of the heap: the larger spread first, then the heavier first set."""
        if self.spread != other.spread:
            return self.spread > other.spread
        return self.sets[0] > other.sets[0]

    def joined(self, other: _Solution) -> _Solution:
        """The heaviest set of one with the lightest of the other, and so on."""
        return _Solution([_union(a, b) for a, b in zip(self.sets, reversed(other.sets), strict=True)])


def _union(a: tuple, b: tuple) -> tuple:
    if not a[1] or not b[1]:
        return a if a[1] else b
    return (a[0] + b[0], a[1] + b[1], a[2], (a[3], b[3]))


def _members(tree: int | tuple | None) -> list[int]:
    """The indices in a tree of joins."""
    found, stack = [], [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            stack += node
        elif node is not None:
            found.append(node)
    return found


def karmarkar_karp(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Indices of ``seqlen_list`` in ``k_partitions`` sets of nearly equal sums, heaviest set first.

    With ``equal_size`` all sets have the same number of elements, which must then divide by ``k_partitions``.
    """
    ordered = sorted((int(length), index) for index, length in enumerate(seqlen_list))
    group = k_partitions if equal_size else 1
    assert len(ordered) % group == 0, f"{len(ordered)} lengths do not divide into {k_partitions} sets of equal size"
    heap = []
    for start in range(0, len(ordered), group):
        sets = [(length, 1, index, index) for length, index in ordered[start : start + group]]
        heap.append(_Solution(sets + [_EMPTY_SET] * (k_partitions - len(sets))))
    heapq.heapify(heap)
    while len(heap) > 1:
        heapq.heappush(heap, heapq.heappop(heap).joined(heapq.heappop(heap)))
    return [_members(tree) for _, _, _, tree in heap[0].sets]


def greedy_partition(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Each length in turn to the set with the smallest sum (with ``equal_size``: among those that are not full)."""
    size_limit = len(seqlen_list) // k_partitions if equal_size else len(seqlen_list)
    sums, partitions = [0] * k_partitions, [[] for _ in range(k_partitions)]
    for index, length in enumerate(seqlen_list):
        target = min((p for p in range(k_partitions) if len(partitions[p]) < size_limit), key=sums.__getitem__)
        partitions[target].append(index)
        sums[target] += int(length)
    return partitions


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Indices of ``seqlen_list`` in ``k_partitions`` sets of nearly equal sums; indices within a set ascend.

    Args:
        seqlen_list: lengths in tokens.
        k_partitions: number of sets, at most the number of lengths.
        equal_size: all sets have the same number of elements.
    """
    assert len(seqlen_list) >= k_partitions, f"{len(seqlen_list)} lengths cannot fill {k_partitions} sets"
    partitions = [sorted(part) for part in karmarkar_karp(seqlen_list, k_partitions, equal_size)]
    assert all(partitions), "a set is empty"
    assert sorted(index for part in partitions for index in part) == list(range(len(seqlen_list)))
    return partitions


def partition_by_token_budget(
    lengths: Sequence[int],
    max_tokens: int,
    min_partitions: int = 1,
    key: str = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
) -> list[list[int]]:
    """Micro-batches: indices of ``lengths`` in as few balanced sets as keep every sum within ``max_tokens``.

    Args:
        lengths: tokens of each row.
        max_tokens: the budget of a set.
        min_partitions: make at least so many sets (no more than there are rows), e.g. what another rank needs.
        key: the config key of the budget, for the error message.

    Raises:
        ValueError: a single row exceeds the budget.
    """
    if len(lengths) == 0:
        return []
    longest = max(int(length) for length in lengths)
    if longest > max_tokens:
        raise ValueError(f"a row has {longest} tokens, the budget is {max_tokens}; set {key} to {longest} or more")
    total = sum(int(length) for length in lengths)
    count = min(max(ceildiv(total, max_tokens), min_partitions, 1), len(lengths))
    while True:
        partitions = get_seqlen_balanced_partitions(lengths, count, equal_size=False)
        if max(sum(int(lengths[index]) for index in part) for part in partitions) <= max_tokens:
            return partitions
        count += 1


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """The inverse permutation: ``reverse[idx_map[i]] == i``."""
    reverse = [0] * len(idx_map)
    for position, index in enumerate(idx_map):
        reverse[index] = position
    return reverse


def log_seqlen_unbalance(
    seqlen_list: Sequence[int], partitions: Sequence[Sequence[int]], prefix: str
) -> dict[str, float]:
    """How uneven the ranks' tokens are without balancing (contiguous parts) and with ``partitions``.

    Returns ``<prefix>/{min,max,minmax_diff}`` over contiguous parts of equal size, ``<prefix>/{balanced_min,
    balanced_max}`` over the given sets, and ``<prefix>/mean``, all in tokens of a rank.
    """
    k = len(partitions)
    size = len(seqlen_list) // k
    # A rest that does not divide belongs to the last part.
    bounds = [(rank * size, (rank + 1) * size if rank < k - 1 else len(seqlen_list)) for rank in range(k)]
    plain = [sum(int(length) for length in seqlen_list[start:end]) for start, end in bounds]
    balanced = [sum(int(seqlen_list[index]) for index in part) for part in partitions]
    return {
        f"{prefix}/min": min(plain),
        f"{prefix}/max": max(plain),
        f"{prefix}/minmax_diff": max(plain) - min(plain),
        f"{prefix}/balanced_min": min(balanced),
        f"{prefix}/balanced_max": max(balanced),
        f"{prefix}/mean": sum(plain) / k,
    }


def rearrange_micro_batches(
    batch: Any, max_token_len: int, dp_group: dist.ProcessGroup | None = None
) -> tuple[list[Any], list[list[int]]]:
    """Cut a padded ``TensorDict`` (with ``attention_mask``, (rows, length)) into balanced micro-batches.

    All ranks of ``dp_group`` get the same number. Returns the micro-batches and their row indices; undo the order
    with :func:`get_reverse_idx` of the flattened indices.
    """
    mask = batch["attention_mask"]
    padded_length = mask.shape[-1]
    assert max_token_len >= padded_length, (
        f"max_token_len={max_token_len} must be at least the padded length of a row, {padded_length}"
    )
    lengths = mask.sum(dim=1).tolist()
    partitions = partition_by_token_budget(lengths, max_token_len)
    if dp_group is not None and dist.is_initialized():
        count = torch.tensor([len(partitions)], device=_collective_device(dp_group))
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=dp_group)
        wanted = int(count.item())
        assert wanted <= len(lengths), f"{len(lengths)} rows cannot fill the {wanted} micro-batches of another rank"
        if wanted > len(partitions):
            partitions = get_seqlen_balanced_partitions(lengths, wanted, equal_size=False)
    return [batch[torch.tensor(part, device=mask.device)] for part in partitions], partitions


def _collective_device(group: dist.ProcessGroup) -> torch.device:
    on_gpu = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
