"""Products as the shop sees them, made from records in the official schema.

Strict reading follows the original, crashes included: each becomes a :class:`RecordError` that names the record and the
field and keeps the original's exception type. Tolerant reading, the default, repairs what has an obvious meaning (a
null text is empty, a price that cannot be read is the default price) and skips what has none (no asin), counting both.
"""

from __future__ import annotations

import decimal
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)

DEFAULT_PRICE = 100.0
MAX_PRICE = 1e15  # a larger number is no price
NO_ATTRIBUTES = "DUMMY_ATTR"
MAX_ASIN_LENGTH = 10

Options = dict[str, list[str]]

#: A raw product record, what the attribute file has for its asin, and its human instructions (None: nothing).
Entry = tuple[Any, Any, Any]


class RecordError(ValueError):
    """A record that the original cannot load.

    original: name of the exception type that the original raises on it.
    """

    def __init__(self, message: str, original: str) -> None:
        super().__init__(message)
        self.original = original


@dataclass(slots=True)
class Product:
    """One product. Texts are verbatim; option groups and values are lower-cased as the shop shows them."""

    asin: str
    title: str | None
    description: str | None
    bullets: list[Any]
    price_tag: str
    prices: list[float]  # one price, or two bounds in the order given
    category: str | None
    query: str
    product_category: str | None
    attributes: list[str]
    options: Options = field(default_factory=dict)
    option_images: dict[str, str | None] = field(default_factory=dict)
    main_image: str | None = None
    instruction: str | None = None  # synthetic instruction; None: none
    instruction_attributes: list[str] | None = None
    human_instructions: list[dict[str, Any]] | None = None


@dataclass
class LoadReport:
    """What tolerant reading did: counts by reason."""

    products: int = 0
    repaired: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        lines = [f"{self.products:,} products loaded"]
        lines += [f"{count:,} records skipped: {reason}" for reason, count in self.skipped.most_common()]
        lines += [f"{count:,} fields repaired: {reason}" for reason, count in self.repaired.most_common()]
        return lines


class _Guard:
    """Turns exceptions of one record into repairs (tolerant) or named errors (strict)."""

    def __init__(self, strict: bool, report: LoadReport, source: str) -> None:
        self.strict = strict
        self.report = report
        self.source = source
        self.where = ""

    def read(self, key: str, make: Callable[[], Any], fallback: Any) -> Any:
        """``make()``, or on an error ``fallback``."""
        try:
            return make()
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, decimal.InvalidOperation) as error:
            if self.strict:
                raise self.error(key, error) from error
            self.report.repaired[f"{key} unusable"] += 1
            return fallback

    def error(self, key: str, error: Exception) -> RecordError:
        name = type(error).__name__
        return RecordError(f"{self.source}: {self.where}: field {key!r} cannot be used ({name}: {error})", name)


def parse_price(pricing: Any) -> tuple[list[float], str]:
    """Value list (one price or two bounds) and tag of a price text.

    Each part after a ``$`` is read from its digits and dots alone: ``$1,299.00`` is 1299.0, ``$-5`` is 5.0.
    """
    if not pricing:
        return [DEFAULT_PRICE], f"${DEFAULT_PRICE}"
    values = []
    for part in pricing.split("$")[1:]:
        digits = "".join(ch for ch in part if ch.isdecimal() or ch == ".")
        values.append(float(decimal.Decimal(digits)))
    if len(values) == 0:
        raise IndexError("the price text has no $ sign")
    if len(values) == 1:
        return values, f"${values[0]}"
    return values[:2], f"${values[0]} to ${values[1]}"


def parse_options(customization: Any) -> tuple[Options, dict[str, str | None]]:
    """Option values by group and the picture of each value."""
    options: Options = {}
    images: dict[str, str | None] = {}
    if not customization:
        return options, images
    for name, contents in customization.items():
        if contents is None:
            continue
        values = []
        for content in contents:
            value = content["value"].strip().replace("/", " | ").lower()
            values.append(value)
            images[value] = content.get("image", None)
        options[name.lower()] = values
    return options, images


def _tolerant_price(pricing: Any) -> tuple[list[float], str]:
    """A price that :func:`parse_price` cannot read: a plain number, or the default."""
    if isinstance(pricing, (int, float)) and not isinstance(pricing, bool) and 0 <= pricing < MAX_PRICE:
        return [float(pricing)], f"${float(pricing)}"
    return [DEFAULT_PRICE], f"${DEFAULT_PRICE}"


def _tolerant_options(customization: Any, report: LoadReport) -> tuple[Options, dict[str, str | None]]:
    """Groups that can be read, without the values that cannot."""
    options: Options = {}
    images: dict[str, str | None] = {}
    if not isinstance(customization, dict):
        return options, images
    for name, contents in customization.items():
        if not isinstance(contents, list):
            continue
        usable = [c for c in contents if isinstance(c, dict) and isinstance(c.get("value"), str)]
        report.repaired["option value dropped"] += len(contents) - len(usable)
        if contents and not usable:
            continue
        group, group_images = parse_options({name: usable})
        options.update(group)
        images.update(group_images)
    return options, images


def _text(record: dict[str, Any], key: str, guard: _Guard) -> str | None:
    value = guard.read(key, lambda: record[key], "")
    if guard.strict or isinstance(value, str):
        return value
    guard.report.repaired[f"{key} is not a text"] += 1
    return "" if value is None else str(value)


def _bullets(record: dict[str, Any], guard: _Guard) -> list[Any]:
    value = guard.read("small_description", lambda: record["small_description"], [])
    bullets = value if isinstance(value, list) else [value]
    if guard.strict:
        return bullets
    return [b if isinstance(b, str) else str(b) for b in bullets if b is not None]


def _attributes(entry: Any, guard: _Guard) -> list[str]:
    if entry is None or (isinstance(entry, dict) and "attributes" not in entry):
        return [NO_ATTRIBUTES]
    found = guard.read("attributes", lambda: list(entry["attributes"]), [NO_ATTRIBUTES])
    return found if guard.strict else [str(a) for a in found]


def _product(record: dict[str, Any], asin: str, entry: Any, human: Any, guard: _Guard) -> Product:
    report = guard.report
    title = _text(record, "name", guard)
    description = _text(record, "full_description", guard)
    bullets = _bullets(record, guard)
    query = guard.read("query", lambda: record["query"].lower().strip(), "")
    pricing = record.get("pricing")
    prices, tag = guard.read("pricing", lambda: parse_price(pricing), None) or _tolerant_price(pricing)
    customization = guard.read("customization_options", lambda: record["customization_options"], None)
    parsed = guard.read("customization_options", lambda: parse_options(customization), None)
    options, images = parsed if parsed is not None else _tolerant_options(customization, report)
    if not guard.strict:
        images = {value: image if isinstance(image, str) else None for value, image in images.items()}
    main_image = guard.read("images", lambda: record["images"][0], None)
    attributes = _attributes(entry, guard)
    product = Product(
        asin=asin, title=title, description=description, bullets=bullets, price_tag=tag, prices=prices,
        category=_text(record, "category", guard), query=query,
        product_category=_text(record, "product_category", guard), attributes=attributes, options=options,
        option_images=images, main_image=main_image,
    )  # fmt: skip
    if isinstance(entry, dict):
        product.instruction = entry.get("instruction")
        product.instruction_attributes = entry.get("instruction_attributes")
        if not guard.strict:
            _repair_instruction(product, report)
    if human is not None:
        product.human_instructions = human if guard.strict else _usable_instructions(human, report)
    return product


def _repair_instruction(product: Product, report: LoadReport) -> None:
    """A synthetic instruction needs a text and at least one attribute; without them the product has no goal."""
    if product.instruction is None:
        return
    attributes = product.instruction_attributes
    texts = _texts(attributes, "attribute of an instruction dropped", report)
    if not isinstance(product.instruction, str) or not texts:
        report.repaired["synthetic instruction without attributes dropped"] += 1
        product.instruction, product.instruction_attributes = None, None
    else:
        product.instruction_attributes = texts


def _texts(values: Any, dropped: str, report: LoadReport) -> list[str]:
    """The texts of a list; anything else in it is counted as ``dropped``."""
    items = values if isinstance(values, list) else []
    texts = [item for item in items if isinstance(item, str)]
    if len(texts) < len(items):
        report.repaired[dropped] += len(items) - len(texts)
    return texts


def _usable_instructions(human: Any, report: LoadReport) -> list[dict[str, Any]]:
    usable = []
    for item in human if isinstance(human, list) else []:
        if isinstance(item, dict) and isinstance(item.get("instruction"), str):
            options = item.get("instruction_options")
            if not isinstance(options, dict):
                options = _texts(options, "option of an instruction dropped", report)
            texts = _texts(item.get("instruction_attributes"), "attribute of an instruction dropped", report)
            usable.append(
                {
                    "instruction": item["instruction"],
                    "instruction_attributes": texts,
                    "instruction_options": options,
                }
            )
        else:
            report.repaired["human instruction dropped"] += 1
    return usable


def read_products(
    entries: Iterable[Entry],
    *,
    num_products: int | None = None,
    strict: bool = False,
    human_goals: bool = False,
    source: str = "products",
    report: LoadReport | None = None,
) -> Iterator[Product]:
    """Products of ``entries`` in order, without repeats.

    ``num_products`` counts raw records; then records with asin ``nan``, with more than ten characters, or seen before
    are skipped. ``human_goals`` matters to strict reading alone: with synthetic goals the original needs every product
    in the attribute file.
    """
    report = LoadReport() if report is None else report
    guard = _Guard(strict, report, source)
    seen: set[str] = set()
    for index, (record, attributes, human) in enumerate(entries):
        if num_products is not None and index >= num_products:
            return
        guard.where = f"record {index}"
        asin = _asin(record, guard)
        if asin is None:
            continue
        guard.where = f"record {index} ({asin})"
        if asin == "nan" or len(asin) > MAX_ASIN_LENGTH:
            report.skipped["asin is nan or longer than ten characters"] += 1
            continue
        if asin in seen:
            report.skipped["asin seen before"] += 1
            continue
        seen.add(asin)
        if strict and not human_goals and attributes is None:
            raise guard.error("asin", KeyError(asin))
        report.products += 1
        yield _product(record, asin, attributes, human, guard)


def _asin(record: Any, guard: _Guard) -> str | None:
    if guard.strict:
        asin = guard.read("asin", lambda: record["asin"], None)
        guard.read("asin", lambda: len(asin), None)
        return asin
    asin = record.get("asin") if isinstance(record, dict) else None
    if isinstance(asin, str):
        return asin
    guard.report.skipped["no asin"] += 1
    return None
