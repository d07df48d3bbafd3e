"""How an update is cut for the memory there is: bytes, costs, and the cheapest of them."""

from __future__ import annotations

import numpy as np
import pytest

from verl.models.memory_plan import (
    LEAST_TOKENS,
    UpdateMemory,
    cheapest_way,
    costs_by_limit,
    launch_tokens,
)
from verl.models.micro_batches import split_by_tokens

# Ten layers of 90 bytes a token, 10 where they are recomputed; 180 more for the layer at work.
MEMORY = UpdateMemory(layers=10, kept=90.0, inputs=10.0, fixed=1_000.0)
FROZEN = UpdateMemory(layers=10, kept=90.0, inputs=10.0, fixed=1_000.0, may_recompute=False)


def test_bytes_of_a_micro_batch() -> None:
    assert MEMORY.needed(100, 0) == 1_000 + 100 * (180 + 10 * 90)
    assert MEMORY.needed(100, 4) == 1_000 + 100 * (180 + 6 * 90 + 4 * 10)
    assert MEMORY.needed(0, 0) == 1_000


def test_as_many_layers_are_recomputed_as_it_takes() -> None:
    assert MEMORY.recomputed(100, free=109_000) == 0
    assert MEMORY.recomputed(100, free=108_999) == 1  # each saves 8,000
    assert MEMORY.recomputed(100, free=101_000) == 1
    assert MEMORY.recomputed(100, free=100_999) == 2
    assert MEMORY.recomputed(100, free=29_000) == 10
    assert MEMORY.recomputed(100, free=0) == 10
    assert MEMORY.needed(100, 10) == 29_000
    assert FROZEN.recomputed(100, free=0) == 0
    rng = np.random.default_rng(0)
    for free, tokens in zip(rng.uniform(0, 2e5, 200), rng.integers(1, 200, 200).tolist()):
        count = MEMORY.recomputed(tokens, free)
        assert count == next((r for r in range(11) if MEMORY.needed(tokens, r) <= free), 10)


def test_recomputing_all_layers_costs_a_third_and_a_micro_batch_its_launches() -> None:
    sizes = [[60, 40], [100]]

    def cost(free: float, launches: float = 7, memory: UpdateMemory = MEMORY) -> float:
        return cheapest_way(sizes, memory, free, 0, launches)[0]

    assert cost(free=1e9) == 200 + 3 * 7
    assert cost(free=101_000) == pytest.approx(200 * (1 + 1 / 30) + 3 * 7)
    assert cost(free=29_000, launches=0) == pytest.approx(200 * 4 / 3)
    assert cheapest_way([], MEMORY, 1e9, 0, 7) == (0, False)
    assert 1e12 < cost(free=28_999) < cost(free=20_000)
    assert cost(free=109_000, memory=FROZEN) < 1e12 < cost(free=108_999, memory=FROZEN)


def test_launches_of_a_shape_of_1_5_b_are_worth_some_2500_tokens() -> None:
    assert launch_tokens(28, 1_310_000_000) == pytest.approx(2_565, abs=1)
    assert launch_tokens(30, 106_000_000) > 10 * launch_tokens(28, 1_310_000_000)  # smaller layers wait longer


def _cheapest(free: float, launches: float, limit: int = 16_384, memory: UpdateMemory = MEMORY) -> int:
    lengths = np.random.default_rng(1).integers(500, 900, 32)  # some 22,000 tokens

    def split(tokens: int) -> list[list[int]]:
        return [[int(lengths[group].sum()) for group in split_by_tokens(lengths.tolist(), tokens)]]

    limits, costs = costs_by_limit(limit, split, memory, free, 0, launches)
    assert limits[0] == limit and min(limits) >= min(limit, LEAST_TOKENS) and len(limits) == len(costs)
    return len(split(limits[int(np.argmin(costs))])[0])


def test_micro_batches_become_smaller_where_recomputing_costs_more_than_launching() -> None:
    roomy, half = 2e7, 1_000 + 11_500 * (180 + 450 + 50)  # half of the layers of two micro-batches
    assert _cheapest(roomy, launches=2_500) == 2
    assert _cheapest(half, launches=2_500) == 3  # a sixth of 22,000 tokens is more than 2,500
    assert _cheapest(half, launches=10_000) == 2
    assert _cheapest(half, launches=100) == 4
    assert _cheapest(half, launches=10_000, memory=FROZEN) == 4  # nothing else fits
    assert _cheapest(0, launches=2_500) == 13  # nothing ever fits, and the smallest, two or three rows, come nearest
    assert _cheapest(roomy, launches=2_500, limit=900) == 32  # a limit of the user's is not exceeded


def test_limits_go_down_from_the_one_that_was_given() -> None:
    limits, costs = costs_by_limit(8_192, lambda tokens: [[tokens]], MEMORY, 1e9, 0, 10)
    assert limits == [8192, 6553, 5461, 4681, 4096, 3276, 2730, 2048]
    assert costs == [tokens + 10 for tokens in limits]
    assert costs_by_limit(1_000, lambda tokens: [[tokens]], MEMORY, 1e9, 0, 10) == ([1_000], [1_010])


@pytest.mark.parametrize("limit", [16_384, 20_000, 131_072, 10**9])
def test_a_generous_limit_leaves_no_micro_batch_too_large_for_the_memory(limit: int) -> None:
    least = MEMORY.needed(LEAST_TOKENS, MEMORY.layers)

    def split(tokens: int) -> list[list[int]]:
        return [[min(tokens, 40_000)] * 2]

    limits, costs = costs_by_limit(limit, split, MEMORY, least, 0, 10)
    assert limits[0] == limit and limits[-1] == LEAST_TOKENS
    assert all(1 < larger / smaller <= 4 / 3 + 0.01 for larger, smaller in zip(limits[10:], limits[11:]))
    assert int(np.argmin(costs)) == len(limits) - 1 and costs[-1] < 1e12 < costs[-2]


def test_full_gradients_wait_only_where_they_cost_little_memory() -> None:
    def at_once(sizes: list[list[int]], unreduced: float, free: float) -> bool:
        return cheapest_way(sizes, MEMORY, free, unreduced, launches=7)[1]

    two, three, one = [[100, 90]], [[100, 90, 80]], [[100]]
    assert not at_once(two, unreduced=0, free=29_000)
    assert not at_once(two, unreduced=6_000, free=115_000)
    assert at_once(two, unreduced=6_000, free=34_999)  # with all layers recomputed 29,000 have to stay
    # A layer of ten costs 3.3 % of the time, two of them 6.7 %, a reduction that is saved 3 %.
    assert at_once(two, unreduced=6_000, free=114_999)
    assert not at_once(three, unreduced=6_000, free=114_999)
    assert at_once(three, unreduced=14_000, free=114_999)
    assert at_once(one, unreduced=6_000, free=114_999)  # nothing is saved, as it is reduced once anyway
    assert not at_once(one, unreduced=6_000, free=115_000)
    cost, _ = cheapest_way(two, MEMORY, 114_999, 6_000, launches=7)
    assert cost == pytest.approx(190 * 1.03 + 2 * 7)


def test_limits_are_weighed_with_gradients_reduced_as_is_cheapest() -> None:
    def costs(unreduced: float) -> list[float]:
        return costs_by_limit(4_096, lambda tokens: [[tokens] * (8_192 // tokens)], MEMORY, 5e6, unreduced, 10)[1]

    assert costs(0)[0] == 8_192 + 2 * 10
    assert costs(4e6)[0] == pytest.approx(8_192 * 1.03 + 2 * 10)
