"""A shop of any size from a seed, in the schema of the official WebShop files.

Products come in *families* of four: a base product and three near-twins of the same kind. One twin differs in a single
attribute, one in the option values it offers, one in its price, so a search finds them all together and the choice is
left to the shopper. Product ``i`` is a pure function of ``(seed, i)``: a larger catalogue starts with the smaller
one, and any number of products can be streamed without holding them.

The three faces are those of the official files: a list of product records (``items_shuffle*.json``), a mapping from
asin to attributes and a synthetic instruction (``items_ins_v2*.json``), and a mapping from asin to human-sounding
instructions (``items_human_ins.json``).

Left out: reviews, ratings that mean something, and real photographs (``images`` are paths that the site draws).
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from agent_system.environments.env_package.webshop import generator_phrases as phrases
from agent_system.environments.env_package.webshop.generator_records import attribute_record, product_record
from agent_system.environments.env_package.webshop.generator_vocabulary import (
    ASIN_CODES,
    ASIN_HEADS,
    ASIN_TAILS,
    BRAND_ENDS,
    BRAND_MIDDLES,
    BRAND_STARTS,
    KINDS,
    OPTION_POOLS,
    Attribute,
    Kind,
)

__all__ = [
    "FAMILY_SIZE",
    "MAX_PRODUCTS",
    "GeneratedProduct",
    "generate_attributes",
    "generate_human_instructions",
    "generate_products",
    "iter_generated",
    "iter_products",
    "write_dataset",
]

logger = logging.getLogger(__name__)

FAMILY_SIZE = 4
SMALL_CATALOGUE = len(ASIN_HEADS) * len(ASIN_TAILS)
MAX_PRODUCTS = SMALL_CATALOGUE + (len(ASIN_CODES) - len(ASIN_HEADS)) * len(ASIN_CODES)

#: The three official file names for a small (<= 1,000 products) and a larger catalogue.
SMALL_FILES = ("items_shuffle_1000.json", "items_ins_v2_1000.json", "items_human_ins.json")
FULL_FILES = ("items_shuffle.json", "items_ins_v2.json", "items_human_ins.json")

# Every one of the first 10,000 products has human instructions; later ones about as rarely as in the official data.
_DENSE_HUMAN_PRODUCTS = 10_000
_SPARSE_HUMAN_SHARE = 0.02
_TITLE_ONLY_SHARE = 0.90  # of the instructions that ask for nothing but what the title says
_TWINS = ("attribute", "options", "price")


@dataclass(frozen=True)
class GeneratedProduct:
    """One product as drawn, before it is written in the official schema.

    ``attributes`` lists the title's attributes first; ``options`` maps a group name to its values; ``prices`` holds
    one price in dollars, or two (the bounds of a range) when options change the price.
    """

    index: int
    asin: str
    kind: Kind
    brand: str
    title: str
    attributes: tuple[Attribute, ...]
    num_title_attributes: int
    options: dict[str, tuple[str, ...]]
    prices: tuple[float, ...]
    description: str
    bullets: tuple[str, ...]
    instruction: str
    instruction_attributes: tuple[str, ...]
    human: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class _Draft:
    """What the members of a family share and vary."""

    kind: Kind
    attributes: tuple[Attribute, ...]
    num_title_attributes: int
    options: dict[str, tuple[str, ...]]
    prices: tuple[float, ...]


def generate_products(num_products: int, seed: int) -> list[dict[str, Any]]:
    """The product file: a list of ``num_products`` records in the official schema.

    Raises:
        ValueError: ``num_products`` is negative or larger than the number of ids there are (10^8).
    """
    return list(iter_products(num_products, seed))


def iter_products(num_products: int, seed: int) -> Iterator[dict[str, Any]]:
    """As :func:`generate_products`, one record at a time: constant memory at any size."""
    return (product_record(product) for product in iter_generated(num_products, seed))


def generate_attributes(num_products: int, seed: int) -> dict[str, dict[str, Any]]:
    """The attribute file: asin -> attributes, synthetic instruction and the attributes which that one asks for."""
    return {product.asin: attribute_record(product) for product in iter_generated(num_products, seed)}


def generate_human_instructions(num_products: int, seed: int) -> dict[str, list[dict[str, Any]]]:
    """The human instruction file: asin -> its instructions (products without any are absent)."""
    return {product.asin: list(product.human) for product in iter_generated(num_products, seed) if product.human}


def iter_generated(num_products: int, seed: int) -> Iterator[GeneratedProduct]:
    """Products ``0 .. num_products - 1`` of the shop with this seed, in catalogue order.

    Raises:
        ValueError: ``num_products`` is negative or larger than :data:`MAX_PRODUCTS`.
    """
    if not 0 <= num_products <= MAX_PRODUCTS:
        raise ValueError(f"env.webshop.num_products must be between 0 and {MAX_PRODUCTS}, got {num_products}")
    return _iter_generated(num_products, seed)


def _iter_generated(num_products: int, seed: int) -> Iterator[GeneratedProduct]:
    ids = _AsinSequence(seed)
    order: list[int] = []
    for family in range((num_products + FAMILY_SIZE - 1) // FAMILY_SIZE):
        position = family % len(KINDS)
        if position == 0:  # each round of families visits every kind once, in a fresh order
            order = list(range(len(KINDS)))
            random.Random(f"kinds/{seed}/{family}").shuffle(order)
        rng = random.Random(f"family/{seed}/{family}")
        drafts = _draw_family(KINDS[order[position]], rng)
        for member, draft in enumerate(drafts):
            index = family * FAMILY_SIZE + member
            if index >= num_products:
                return
            yield _finish(index, ids.asin(index), _draw_brand(family, rng), draft, rng)


class _AsinSequence:
    """Unique ids in an order of the seed's own; the first ``SMALL_CATALOGUE`` are of the common heads and tails."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(f"asin/{seed}")
        self._small = _Permutation(SMALL_CATALOGUE, rng)
        self._large = _Permutation(MAX_PRODUCTS - SMALL_CATALOGUE, rng)

    def asin(self, index: int) -> str:
        if index < SMALL_CATALOGUE:
            head, tail = divmod(self._small(index), len(ASIN_TAILS))
            return f"B0{ASIN_HEADS[head]}{ASIN_TAILS[tail]}"
        head, tail = divmod(self._large(index - SMALL_CATALOGUE), len(ASIN_CODES))
        return f"B0{ASIN_CODES[len(ASIN_HEADS) + head]}{ASIN_CODES[tail]}"


class _Permutation:
    """An affine permutation of ``0 .. size - 1``."""

    def __init__(self, size: int, rng: random.Random) -> None:
        self._size = size
        self._factor = next(f for f in iter(lambda: rng.randrange(size // 5, size), None) if math.gcd(f, size) == 1)
        self._offset = rng.randrange(size)

    def __call__(self, index: int) -> int:
        return (self._factor * index + self._offset) % self._size


def _draw_brand(family: int, rng: random.Random) -> str:
    """A brand out of a pool that grows with the catalogue: 40 at the start, some 2,000 in a very large one."""
    plain = len(BRAND_STARTS) * len(BRAND_ENDS)
    number = rng.randrange(min(40 + family // 100, plain * (len(BRAND_MIDDLES) + 1)))
    middle_number, number = divmod(number, plain)
    number = number * 37 % plain  # 37 shares no factor with the table's size: mixed names, none of them twice
    start, end = divmod(number, len(BRAND_ENDS))
    middle = BRAND_MIDDLES[middle_number - 1] if middle_number else ""
    return BRAND_STARTS[start] + middle + BRAND_ENDS[end]


def _draw_family(kind: Kind, rng: random.Random) -> list[_Draft]:
    """A base product and one twin of each sort, in random order."""
    attributes = tuple(rng.sample(kind.category.attributes, rng.choice((3, 4, 4, 5))))
    base = _Draft(kind, attributes, min(rng.choice((2, 3, 3)), len(attributes) - 1), _draw_options(kind, rng), ())
    price = rng.uniform(kind.low, kind.low + 0.5 * (kind.high - kind.low))
    drafts = [_priced(base, price, rng)]
    for twin in _TWINS:
        varied, twin_price = base, price * rng.uniform(0.85, 1.2)
        if twin == "attribute":
            varied = _with_other_attribute(base, rng)
        elif twin == "options":
            varied = _with_other_options(base, rng)
        else:
            twin_price = price * rng.uniform(1.4, 1.9) + 25
        drafts.append(_priced(varied, twin_price, rng))
    rng.shuffle(drafts)
    return drafts


def _priced(draft: _Draft, price: float, rng: random.Random) -> _Draft:
    """Give a draft its price; where options change the price (one in five) a range of two."""
    prices: tuple[float, ...] = (_shelf_price(price, rng),)
    if draft.options and rng.random() < 0.2:
        upper = _shelf_price(price * rng.uniform(1.15, 1.4) + 2, rng)
        prices = (prices[0], upper)
    return _Draft(draft.kind, draft.attributes, draft.num_title_attributes, draft.options, prices)


def _shelf_price(price: float, rng: random.Random) -> float:
    """Whole dollars and a shop's usual cents; never a trailing zero, so that page and file show the same digits."""
    return max(int(price), 1) + rng.choice((0.99, 0.99, 0.99, 0.49, 0.95))


def _with_other_attribute(base: _Draft, rng: random.Random) -> _Draft:
    """The twin that lacks one of the title's attributes and has another instead."""
    others = [attribute for attribute in base.kind.category.attributes if attribute not in base.attributes]
    attributes = list(base.attributes)
    attributes[rng.randrange(base.num_title_attributes)] = rng.choice(others)
    return _Draft(base.kind, tuple(attributes), base.num_title_attributes, base.options, base.prices)


def _with_other_options(base: _Draft, rng: random.Random) -> _Draft:
    """The twin that offers other values of one group, or fewer where the pool has no others."""
    options = dict(base.options)
    if options:
        group = rng.choice(list(options))
        pool = OPTION_POOLS[dict(base.kind.category.option_groups)[group]]
        missing = [value for value in pool if value not in options[group]]
        kept = rng.sample(options[group], max(len(options[group]) // 2, 1))
        added = rng.sample(missing, min(len(missing), len(options[group]) - len(kept)))
        options[group] = tuple(sorted(kept + added, key=pool.index))
    return _Draft(base.kind, base.attributes, base.num_title_attributes, options, base.prices)


def _draw_options(kind: Kind, rng: random.Random) -> dict[str, tuple[str, ...]]:
    """0, 1 or 2 option groups with 2-5 values each, in the pool's order."""
    groups = kind.category.option_groups
    count = min(rng.choices((0, 1, 2), weights=(15, 40, 45))[0], len(groups))
    chosen = sorted(rng.sample(range(len(groups)), count))
    options: dict[str, tuple[str, ...]] = {}
    for position in chosen:
        group, pool_name = groups[position]
        pool = OPTION_POOLS[pool_name]
        most = min(len(pool), 5 if count == 1 else 4)
        values = rng.sample(pool, rng.randint(2, most))
        options[group] = tuple(sorted(values, key=pool.index))
    return options


def _finish(index: int, asin: str, brand: str, draft: _Draft, rng: random.Random) -> GeneratedProduct:
    """Write the texts of one product and the instructions that ask for it."""
    on_title = draft.attributes[: draft.num_title_attributes]
    asked = _draw_asked(draft, rng)
    texts = tuple(attribute.text for attribute in asked)
    human: list[dict[str, Any]] = []
    if index < _DENSE_HUMAN_PRODUCTS or rng.random() < _SPARSE_HUMAN_SHARE:
        human = [_draw_human(asin, draft, rng) for _ in range(rng.choice((1, 1, 2)))]
    return GeneratedProduct(
        index=index,
        asin=asin,
        kind=draft.kind,
        brand=brand,
        title=phrases.title(brand, draft.kind, on_title, rng),
        attributes=draft.attributes,
        num_title_attributes=draft.num_title_attributes,
        options=draft.options,
        prices=draft.prices,
        description=phrases.description(brand, draft.kind, rng),
        bullets=phrases.bullets(draft.attributes, draft.num_title_attributes, rng),
        instruction=phrases.synthetic_instruction(draft.kind.name, asked, rng),
        instruction_attributes=texts,
        human=tuple(human),
    )


def _draw_asked(draft: _Draft, rng: random.Random) -> tuple[Attribute, ...]:
    """The 1-3 attributes that an instruction asks for, mostly such as the title shows."""
    on_title = draft.attributes[: draft.num_title_attributes]
    count = min(rng.choices((1, 2, 3), weights=(15, 50, 35))[0], len(on_title))
    asked = rng.sample(on_title, count)
    if rng.random() >= _TITLE_ONLY_SHARE:
        asked[rng.randrange(count)] = rng.choice(draft.attributes[draft.num_title_attributes :])
    return tuple(asked)


def _draw_human(asin: str, draft: _Draft, rng: random.Random) -> dict[str, Any]:
    """One record of the human instruction file: what a shopper says, and what of it counts."""
    asked = _draw_asked(draft, rng)
    groups = list(draft.options)
    if len(groups) == 2 and rng.random() < 0.25:
        groups = [rng.choice(groups)]
    options = {group: rng.choice(draft.options[group]) for group in groups}
    return {
        "asin": asin,
        "instruction": phrases.human_instruction(draft.kind.name, asked, options, rng),
        "attributes": [attribute.text for attribute in draft.attributes],
        "options": [f"{group}: {value}" for group, value in options.items()],
        "instruction_attributes": [attribute.text for attribute in asked],
        "instruction_options": list(options.values()),
        "assignment_id": f"A{rng.randrange(10**9):09d}",
        "worker_id": f"W{rng.randrange(10**5):05d}",
    }


def write_dataset(directory: str | os.PathLike[str], num_products: int, seed: int) -> tuple[Path, Path, Path]:
    """Write the three files under their official names and return their paths (products, attributes, human).

    Files are written beside their final name and renamed when complete, in constant memory.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    names = SMALL_FILES if num_products <= 1000 else FULL_FILES
    paths = (folder / names[0], folder / names[1], folder / names[2])
    parts = [path.with_name(f"{path.name}.{os.getpid()}.tmp") for path in paths]
    try:
        with ExitStack() as stack:
            handles = [stack.enter_context(part.open("w", encoding="utf-8")) for part in parts]
            _write_files(handles, iter_generated(num_products, seed))
    except BaseException:
        for part in parts:
            part.unlink(missing_ok=True)
        raise
    for part, path in zip(parts, paths, strict=True):
        os.replace(part, path)
    logger.info("wrote %d generated products (seed %d) to %s", num_products, seed, folder)
    return paths


def _write_files(handles: Sequence[TextIO], products: Iterable[GeneratedProduct]) -> None:
    """Write products, attributes and human instructions, one line each, as they come."""
    brackets = ("[]", "{}", "{}")
    counts = [0, 0, 0]

    def put(which: int, text: str) -> None:
        handles[which].write(("\n" if counts[which] == 0 else ",\n") + text)
        counts[which] += 1

    for handle, pair in zip(handles, brackets, strict=True):
        handle.write(pair[0])
    for product in products:
        key = json.dumps(product.asin)
        put(0, json.dumps(product_record(product), ensure_ascii=False))
        put(1, f"{key}: {json.dumps(attribute_record(product))}")
        if product.human:
            put(2, f"{key}: {json.dumps(product.human)}")
    for handle, pair in zip(handles, brackets, strict=True):
        handle.write("\n" + pair[1] + "\n")
