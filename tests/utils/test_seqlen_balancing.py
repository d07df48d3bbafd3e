"""Balanced partitions: golden values, invariants, budgets."""

import itertools
import random

import pytest
import torch
from tensordict import TensorDict

from verl.utils.seqlen_balancing import (
    ceildiv,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    greedy_partition,
    log_seqlen_unbalance,
    partition_by_token_budget,
    rearrange_micro_batches,
    roundup_divisible,
)

LENGTHS = [10, 3, 8, 5, 7, 1, 9, 2]


def sums(lengths, partitions):
    return [sum(lengths[index] for index in part) for part in partitions]


def test_golden_partitions():
    equal = get_seqlen_balanced_partitions(LENGTHS, 2, equal_size=True)
    assert equal == [[0, 1, 2, 7], [3, 4, 5, 6]] and sums(LENGTHS, equal) == [23, 22]
    assert get_seqlen_balanced_partitions(LENGTHS, 3, equal_size=False) == [[3, 5, 6], [0, 1, 7], [2, 4]]


@pytest.mark.parametrize("equal_size", [False, True])
def test_every_row_is_in_one_set_and_sets_are_nearly_equal(equal_size):
    draw = random.Random(0)
    for count, k in ((8, 2), (24, 3), (240, 8), (512, 16)):
        lengths = [draw.randint(50, 2000) for _ in range(count)]
        parts = get_seqlen_balanced_partitions(lengths, k, equal_size)
        assert sorted(itertools.chain(*parts)) == list(range(count)) and all(part == sorted(part) for part in parts)
        assert not equal_size or {len(part) for part in parts} == {count // k}
        if count >= 240:
            assert max(sums(lengths, parts)) <= 1.01 * sum(lengths) / k


def test_two_sets_are_close_to_the_best_that_exists():
    draw = random.Random(1)
    for _ in range(20):
        lengths = [draw.randint(1, 50) for _ in range(10)]
        best = min(
            abs(sum(lengths) - 2 * sum(lengths[i] for i in chosen))
            for size in range(1, 10)
            for chosen in itertools.combinations(range(10), size)
        )
        left, right = sums(lengths, get_seqlen_balanced_partitions(lengths, 2, equal_size=False))
        assert abs(left - right) - best <= 12


def test_equal_lengths_and_as_many_sets_as_rows():
    assert sorted(map(len, get_seqlen_balanced_partitions([5] * 6, 3, equal_size=False))) == [2, 2, 2]
    assert sorted(get_seqlen_balanced_partitions([3, 1, 2], 3, equal_size=True)) == [[0], [1], [2]]
    with pytest.raises(AssertionError):
        get_seqlen_balanced_partitions([1, 2], 3, equal_size=False)
    with pytest.raises(AssertionError):
        get_seqlen_balanced_partitions([1, 2, 3], 2, equal_size=True)


def test_micro_batches_keep_the_budget_with_few_sets():
    draw = random.Random(2)
    for _ in range(20):
        lengths = [draw.randint(10, 1000) for _ in range(100)]
        parts = partition_by_token_budget(lengths, 4000)
        assert max(sums(lengths, parts)) <= 4000 and sorted(itertools.chain(*parts)) == list(range(100))
        assert len(parts) <= ceildiv(sum(lengths), 4000) + 1
    assert partition_by_token_budget([], 10) == []
    assert partition_by_token_budget([6, 6, 6], 10) == [
        [2],
        [1],
        [0],
    ]  # two sets would do for 18 tokens, were rows divisible
    assert len(partition_by_token_budget([1, 1, 1], 10, min_partitions=2)) == 2
    assert len(partition_by_token_budget([1, 1, 1], 10, min_partitions=9)) == 3
    with pytest.raises(ValueError, match="some.key to 11"):
        partition_by_token_budget([3, 11], 10, key="some.key")


def test_unbalance_metrics():
    metrics = log_seqlen_unbalance([1, 2, 30, 40], [[0, 3], [1, 2]], "global_seqlen")
    assert metrics == {
        "global_seqlen/min": 3,
        "global_seqlen/max": 70,
        "global_seqlen/minmax_diff": 67,
        "global_seqlen/balanced_min": 32,
        "global_seqlen/balanced_max": 41,
        "global_seqlen/mean": 36.5,
    }


def test_rearrange_padded_batch_and_back():
    lengths = torch.tensor([4, 1, 3, 2, 4, 4])
    mask = (torch.arange(4) < lengths[:, None]).long()
    batch = TensorDict({"attention_mask": mask, "row": torch.arange(6)}, batch_size=(6,))
    micro, index = rearrange_micro_batches(batch, max_token_len=8)
    assert all(part["attention_mask"].sum() <= 8 for part in micro)
    flat = list(itertools.chain(*index))
    assert torch.cat([part["row"] for part in micro]).tolist() == flat
    restored = torch.cat([part["row"] for part in micro])[torch.tensor(get_reverse_idx(flat))]
    assert restored.tolist() == list(range(6))
    with pytest.raises(AssertionError):
        rearrange_micro_batches(batch, max_token_len=3)


def test_small_arithmetic():
    assert [ceildiv(a, 4) for a in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [roundup_divisible(a, 4) for a in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert greedy_partition([4, 3, 2, 1], 2, equal_size=False) == [[0, 3], [1, 2]]
