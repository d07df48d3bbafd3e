"""Goals: what an episode asks for, their order, and which are for training and which for validation.

A goal is a product, an instruction and a price cap. The list is kept as four numbers a goal; the rest is read from the
catalogue when a goal is drawn, so millions of goals cost megabytes.

The order comes from one seed that is the same everywhere, so goal 17 is the same task in every worker and in every run
over the same data. (The reference shuffles per worker; :class:`GoalSeeding` reproduces that on request.)
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from agent_system.environments.env_package.webshop.catalogue import Catalogue
from agent_system.environments.env_package.webshop.options import check_limit_goals

logger = logging.getLogger(__name__)

SHUFFLE_SEED = 233
NO_CAP = 1000000
_CAPS = range(10, 1000, 10)


class NoGoalsError(ValueError):
    """A catalogue has no goal of the kind that was asked for."""


@dataclass
class Goal:
    """One task. ``goal_options`` is a dict group -> value (synthetic) or a list of values (human)."""

    asin: str
    category: str
    query: str
    name: str
    product_category: str
    instruction_text: str
    attributes: list[str]
    price_upper: float
    goal_options: dict[str, str] | list[str]
    weight: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class GoalSeeding:
    """How the random draws of a goal list are seeded.

    before: seed of Python's generator before prices and caps are drawn; None leaves ``rng`` as it is given.
    shuffle: seed just before the shuffle.

    The default is our fixed list. ``verl_agent(seed)`` is the reference's, per worker.
    """

    before: int | None = SHUFFLE_SEED
    shuffle: int = SHUFFLE_SEED

    @classmethod
    def verl_agent(cls, seed: int) -> GoalSeeding:
        return cls(before=seed, shuffle=seed)


def draw_prices(catalogue: Catalogue, rng: random.Random) -> np.ndarray:
    """One price per product, ``(products,)`` float64: the price, or a uniform draw between its bounds."""
    prices = np.array(catalogue.prices[:, 0])
    for row in np.flatnonzero(catalogue.price_counts == 2):
        low, high = catalogue.prices[row]
        prices[row] = rng.uniform(float(low), float(high))
    return prices


def draw_cap(price: float, rng: random.Random) -> float:
    """A price cap: the larger of two of the next four multiples of ten above ``price``; none near 1,000."""
    first = bisect.bisect_right(_CAPS, price)
    candidates = _CAPS[first : first + 4]
    if len(candidates) < 2:
        return NO_CAP
    return max(rng.sample(candidates, 2))


def cap_text(cap: float) -> str:
    return f", and price lower than {float(cap):.2f} dollars" if cap < NO_CAP else ""


class GoalSet:
    """The ordered goal list of a catalogue.

    rows, variants: ``(goals,)`` int32: the product and which of its goals (option combination or instruction).
    caps, weights: ``(goals,)`` float64.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        human: bool,
        prices: np.ndarray,
        rows: np.ndarray,
        variants: np.ndarray,
        caps: np.ndarray,
        weights: np.ndarray,
        cumulative: np.ndarray | None = None,
    ) -> None:
        """``cumulative``: :func:`cumulative_weights` of ``weights``, made when first needed if not given."""
        self.catalogue = catalogue
        self.human = human
        self.prices = prices
        self.rows, self.variants, self.caps, self.weights = rows, variants, caps, weights
        self._texts: dict[int, str] = {}
        self._cumulative = cumulative

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Goal:
        if not -len(self) <= index < len(self):
            raise IndexError(f"goal {index} does not exist: there are {len(self)}, numbered from 0")
        index %= len(self)
        goal = self._goal(int(self.rows[index]), int(self.variants[index]), float(self.caps[index]))
        goal.weight = float(self.weights[index]) if not self.human else 1
        if index in self._texts:
            goal.instruction_text = self._texts[index]
        return goal

    def __iter__(self) -> Iterator[Goal]:
        return (self[index] for index in range(len(self)))

    def set_text(self, index: int, text: str) -> None:
        """Replace the instruction of one goal from now on."""
        self._texts[index % len(self)] = text

    def _goal(self, row: int, variant: int, cap: float) -> Goal:
        product = self.catalogue.product(row)
        options: dict[str, str] | list[str]
        if self.human:
            instruction = (product.human_instructions or [])[variant]
            text = instruction["instruction"].strip(".") + cap_text(cap)
            attributes, options = instruction["instruction_attributes"], instruction["instruction_options"]
        else:
            options = _combination(product.options, variant)
            chosen = ", and ".join(f"{name}: {value}" for name, value in options.items())
            text = (product.instruction or "") + (f" with {chosen}" if chosen else "") + cap_text(cap)
            attributes = product.instruction_attributes or []
        return Goal(
            asin=product.asin, category=product.category or "", query=product.query, name=product.title or "",
            product_category=product.product_category or "", instruction_text=text, attributes=attributes,
            price_upper=min(NO_CAP, cap), goal_options=options, weight=1.0,
        )  # fmt: skip

    def pick(self, rng: random.Random) -> int:
        """A goal index drawn by weight, shifted by one as in the original: goal 0 never, the last one doubly."""
        if self._cumulative is None:
            self._cumulative = cumulative_weights(self.weights)
        return weighted_pick(self._cumulative, rng)

    def digest(self, num_validation: int) -> str:
        """SHA-256 (first 16 hex digits) over the products, the goals in order and where validation ends."""
        digest = hashlib.sha256()
        digest.update(f"{len(self)} {num_validation} {self.human} {self.catalogue.content}".encode())
        for array in (self.rows, self.variants, self.caps):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]


def _combination(options: dict[str, list[str]], variant: int) -> dict[str, str]:
    """Option combination number ``variant``: groups by name, the last one fastest."""
    chosen: dict[str, str] = {}
    for name in sorted(options, reverse=True):
        variant, position = divmod(variant, len(options[name]))
        chosen[name] = options[name][position]
    return dict(reversed(chosen.items()))


def cumulative_weights(weights: np.ndarray) -> np.ndarray:
    """``[0, w0, w0 + w1, ...]``, ``(goals + 1,)`` float64."""
    return np.concatenate([[0.0], np.cumsum(np.asarray(weights, dtype=np.float64))])


def weighted_pick(cumulative: Sequence[float] | np.ndarray, rng: random.Random) -> int:
    position = rng.uniform(0, float(cumulative[-1]))
    if isinstance(cumulative, np.ndarray):
        index = int(np.searchsorted(cumulative, position, side="right"))
    else:
        index = bisect.bisect_right(cumulative, position)
    return min(index, len(cumulative) - 2)


def build_goals(
    catalogue: Catalogue,
    human: bool,
    *,
    seeding: GoalSeeding | None = None,
    rng: random.Random | None = None,
    filter_goals: Callable[[int, dict[str, Any]], bool] | None = None,
    limit: int | None = None,
) -> GoalSet:
    """The goal list of a catalogue.

    Args:
        human: the instructions that people wrote instead of the synthetic ones.
        seeding: None is our fixed order.
        rng: generator of every draw; on return it stands where the original's global one would.
        filter_goals: ``(index, goal) -> keep`` on the shuffled list.
        limit: keep that many goals, drawn by weight; None or -1 keeps all.

    Raises:
        NoGoalsError: there is no goal at all.
        ValueError: ``limit`` is no number of goals.
    """
    check_limit_goals(limit)
    seeding = GoalSeeding() if seeding is None else seeding
    rng = random.Random() if rng is None else rng
    if seeding.before is not None:
        rng.seed(seeding.before)
    prices = draw_prices(catalogue, rng)
    collect = _collect_human if human else _collect_synthetic
    rows, variants, caps, weights = collect(catalogue, prices, rng)
    order = list(range(len(rows)))
    rng.seed(seeding.shuffle)
    rng.shuffle(order)
    goals = GoalSet(catalogue, human, prices, rows[order], variants[order], caps[order], weights[order])
    if filter_goals is not None:
        goals = _keep(goals, [i for i, goal in enumerate(goals) if filter_goals(i, goal.as_dict())])
    if limit is not None and limit != -1 and limit < len(goals):
        goals = _keep(goals, _draw_distinct(goals, limit, rng))
    if not len(goals):
        kind = "human" if human else "synthetic"
        raise NoGoalsError(f"the catalogue has no {kind} goal; check env.webshop.human_goals and the instruction files")
    return goals


def _keep(goals: GoalSet, kept: list[int]) -> GoalSet:
    at = np.asarray(kept, dtype=np.int64)
    return GoalSet(
        goals.catalogue,
        goals.human,
        goals.prices,
        goals.rows[at],
        goals.variants[at],
        goals.caps[at],
        goals.weights[at],
    )


def _draw_distinct(goals: GoalSet, limit: int, rng: random.Random) -> list[int]:
    drawn: dict[int, None] = {}
    while len(drawn) < limit:
        drawn[goals.pick(rng)] = None
    return list(drawn)


_Columns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _columns(rows: list[int], variants: list[int], caps: list[float], weights: list[float]) -> _Columns:
    return (
        np.asarray(rows, dtype=np.int32), np.asarray(variants, dtype=np.int32), np.asarray(caps, dtype=np.float64),
        np.asarray(weights, dtype=np.float64),
    )  # fmt: skip


def _collect_human(catalogue: Catalogue, prices: np.ndarray, rng: random.Random) -> _Columns:
    rows, variants, caps = [], [], []
    for row in range(len(catalogue)):
        for variant, instruction in enumerate(catalogue.human_instructions(row) or ()):
            if not instruction["instruction_attributes"]:
                continue
            caps.append(float(draw_cap(float(prices[row]), rng)))
            rows.append(row)
            variants.append(variant)
            instruction["instruction_options"]  # a goal needs it, be it null
    return _columns(rows, variants, caps, [1.0] * len(rows))


def _collect_synthetic(catalogue: Catalogue, prices: np.ndarray, rng: random.Random) -> _Columns:
    """Goals of every product with a synthetic instruction: one per combination of its options."""
    rows, variants, caps = [], [], []
    needed: list[list[str]] = []  # attributes of the goals, per product
    product_rows: list[int] = []
    numbers: list[int] = []
    counts: Counter[str] = Counter()
    for row in range(len(catalogue)):
        text, attributes = catalogue.synthetic_instruction(row)
        if text is None:
            continue
        if attributes is None:
            raise TypeError(f"product {catalogue.asin(row)}: the instruction's attributes are null")
        if not attributes:
            raise AssertionError(f"product {catalogue.asin(row)}: the instruction has no attributes")
        cap = float(draw_cap(float(prices[row]), rng))
        number = math.prod(catalogue.option_counts(row))
        for attribute in attributes:
            counts[attribute] += number
        needed.append(attributes)
        numbers.append(number)
        product_rows.append(row)
        rows.append(row)
        caps.append(cap)
    weights = [sum(1.0 / counts[a] for a in attributes) / len(attributes) if number else 0.0
               for attributes, number in zip(needed, numbers, strict=True)]  # fmt: skip
    repeat = np.asarray(numbers, dtype=np.int64)
    variants = list(itertools.chain.from_iterable(map(range, numbers)))
    all_rows, _, all_caps, all_weights = _columns(rows, [], caps, weights)
    return (
        np.repeat(all_rows, repeat), np.asarray(variants, dtype=np.int32), np.repeat(all_caps, repeat),
        np.repeat(all_weights, repeat),
    )  # fmt: skip
