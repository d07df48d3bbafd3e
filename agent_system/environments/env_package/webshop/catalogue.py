"""The catalogue of a shop: products and search index in memory-mapped files, built once per machine.

A built catalogue is keyed by the content of its source data and the settings that shape it. Processes that open it
share its pages; private to a process are a cache of recently shown products and a search buffer of eight bytes per
product.
"""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from agent_system.environments.env_package.webshop.index_build import IndexBuilder
from agent_system.environments.env_package.webshop.nouns import NounSource
from agent_system.environments.env_package.webshop.records import Product, RecordError
from agent_system.environments.env_package.webshop.search import SearchIndex
from agent_system.environments.env_package.webshop.sources import ProductSource
from agent_system.environments.env_package.webshop.storage import (
    TextColumn,
    TextColumnWriter,
    code_digest,
    open_array,
    open_or_build,
    read_manifest,
    save_array,
)

logger = logging.getLogger(__name__)

# What shapes a catalogue beside its data: reading, text analysis, index and files.
_CODE = (
    "sources.py", "json_stream.py", "records.py", "catalogue.py", "storage.py", "index_build.py", "analysis.py",
    "porter.py", "search.py",
)  # fmt: skip
_TEXT_COLUMNS = ("asin", "title", "description", "price_tag", "main_image", "nouns", "detail", "instructions")
_CODED_COLUMNS = ("category", "query", "product_category")
_CACHED_PRODUCTS = 2048
_BAR_FROM = 5000  # products; smaller catalogues are built in a second or two


class CodedColumn:
    """A memory-mapped column of texts with few distinct values."""

    def __init__(self, folder: Path, name: str) -> None:
        self._values = TextColumn(folder, f"{name}.values")
        self._codes = open_array(folder, f"{name}.codes")

    def __getitem__(self, row: int) -> str:
        return self._values[int(self._codes[row])]

    def rows_equal(self, text: str) -> np.ndarray:
        """Rows whose value is ``text``, ascending."""
        for code, value in enumerate(self._values):
            if value == text:
                return np.flatnonzero(self._codes == code).astype(np.int32)
        return np.zeros(0, dtype=np.int32)


class _CodedColumnWriter:
    def __init__(self, folder: Path, name: str, exact: bool) -> None:
        self._folder = folder
        self._name = name
        self._exact = exact
        self._codes: dict[str, int] = {}
        self._rows = array("i")

    def append(self, text: str) -> None:
        self._rows.append(self._codes.setdefault(text, len(self._codes)))

    def close(self) -> None:
        values = TextColumnWriter(self._folder, f"{self._name}.values", self._exact)
        for text in self._codes:
            values.append(text)
        values.close()
        save_array(self._folder, f"{self._name}.codes", np.asarray(self._rows, dtype=np.int32))


class Catalogue:
    """An opened catalogue. Products are numbered by row, in the order of the source."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.key: str = manifest["key"]
        self.content: str = manifest["content"]  # digest of the products alone
        self.report: list[str] = manifest["report"]
        self.num_products: int = manifest["products"]
        self._texts = {name: TextColumn(folder, name) for name in _TEXT_COLUMNS}
        self._coded = {name: CodedColumn(folder, name) for name in _CODED_COLUMNS}
        self.prices = open_array(folder, "prices")  # (products, 2) float64: the bounds; equal when there is one price
        self.price_counts = open_array(folder, "price_counts")  # (products,) uint8: 1 or 2
        self._asin_order = open_array(folder, "asin_order")
        self.index = SearchIndex(folder, manifest["index"]["documents"])
        self._products: OrderedDict[int, Product] = OrderedDict()

    @classmethod
    def build(
        cls,
        source: ProductSource,
        cache_dir: str | Path,
        *,
        noun_source: NounSource,
        timeout: float = 7200.0,
    ) -> Catalogue:
        """Open the catalogue of ``source``, building it first if this machine has none (or a damaged one).

        Args:
            cache_dir: folder that holds all built catalogues.
            timeout: seconds to wait for another process that is building the same one.
        """
        recipe = [f"code {code_digest(*_CODE)}", source.key, f"nouns {noun_source.key}"]
        key = hashlib.sha256("\n".join(recipe).encode()).hexdigest()[:24]

        def write(folder: Path) -> dict[str, Any]:
            return {"key": key, **_write(folder, source, noun_source)}

        folder, manifest = open_or_build(Path(cache_dir), key, write, timeout, f"the catalogue of {source.name}")
        return cls(folder, manifest)

    @classmethod
    def open(cls, folder: str | Path) -> Catalogue:
        """Open a built folder.

        Raises:
            DamagedFilesError: it does not match its manifest.
        """
        return cls(Path(folder), read_manifest(Path(folder)))

    def __len__(self) -> int:
        return self.num_products

    def asin(self, row: int) -> str:
        return self._texts["asin"][row]

    def title(self, row: int) -> str:
        return self._texts["title"][row]

    def price_tag(self, row: int) -> str:
        return self._texts["price_tag"][row]

    def nouns(self, row: int) -> list[str]:
        """Lower-cased nouns of the title, in order, repeats kept."""
        text = self._texts["nouns"][row]
        return text.split("\n") if text else []

    def row_of(self, asin: str) -> int | None:
        """The row of a product, None if there is none."""
        low, high = 0, len(self._asin_order)
        asins, order = self._texts["asin"], self._asin_order
        while low < high:
            middle = (low + high) // 2
            if asins[int(order[middle])] < asin:
                low = middle + 1
            else:
                high = middle
        if low < len(order) and asins[int(order[low])] == asin:
            return int(order[low])
        return None

    def rows_with(self, column: str, text: str) -> np.ndarray:
        """Rows whose ``category``, ``query`` or ``product_category`` is ``text``."""
        return self._coded[column].rows_equal(text)

    def product(self, row: int) -> Product:
        """The product of a row; the most recent ones are kept decoded."""
        cache = self._products
        found = cache.get(row)
        if found is None:
            found = self._decode(row)
            cache[row] = found
            if len(cache) > _CACHED_PRODUCTS:
                cache.popitem(last=False)
        return found

    def _decode(self, row: int) -> Product:
        texts = self._texts
        detail = json.loads(texts["detail"][row])
        instruction, instruction_attributes = self.synthetic_instruction(row)
        low, high = self.prices[row]
        return Product(
            asin=texts["asin"][row],
            title=texts["title"][row],
            description=texts["description"][row],
            bullets=detail["bullets"],
            price_tag=texts["price_tag"][row],
            prices=[float(low)] if self.price_counts[row] == 1 else [float(low), float(high)],
            category=self._coded["category"][row],
            query=self._coded["query"][row],
            product_category=self._coded["product_category"][row],
            attributes=detail["attributes"],
            options=detail["options"],
            option_images=detail["images"],
            main_image=texts["main_image"][row] or None,
            instruction=instruction,
            instruction_attributes=instruction_attributes,
            human_instructions=self.human_instructions(row),
        )

    def option_counts(self, row: int) -> list[int]:
        """Number of values in each option group."""
        return [len(values) for values in json.loads(self._texts["detail"][row])["options"].values()]

    def synthetic_instruction(self, row: int) -> tuple[str | None, list[str] | None]:
        text = self._texts["instructions"][row]
        found = json.loads(text) if text else {}
        return found.get("text"), found.get("attributes")

    def human_instructions(self, row: int) -> list[dict[str, Any]] | None:
        text = self._texts["instructions"][row]
        return json.loads(text).get("human") if text else None


def index_text(product: Product) -> str:
    """The searchable text: title, description, first bullet and options, lower-cased."""
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    return " ".join([product.title, product.description, product.bullets[0], options]).lower()  # type: ignore[list-item]


def _searchable(product: Product, strict: bool) -> str:
    """:func:`index_text`, nulls as empty texts; or in strict reading the original's errors, named."""
    if not strict:
        product.title, product.description = product.title or "", product.description or ""
        product.bullets = product.bullets or [""]
    try:
        return index_text(product)
    except (TypeError, IndexError) as error:
        raise RecordError(f"product {product.asin} cannot be indexed ({error})", type(error).__name__) from error


def _write(folder: Path, source: ProductSource, noun_source: NounSource) -> dict[str, Any]:
    """Fill ``folder`` from ``source``; returns the manifest's details."""
    texts = {name: TextColumnWriter(folder, name, exact=source.strict) for name in _TEXT_COLUMNS}
    coded = {name: _CodedColumnWriter(folder, name, exact=source.strict) for name in _CODED_COLUMNS}
    index = IndexBuilder(folder)
    prices, price_counts = array("d"), bytearray()
    asins: list[str] = []
    content = hashlib.sha256()
    hidden = source.expected is not None and source.expected < _BAR_FROM
    bar = tqdm(
        source.products(), total=source.expected, desc=f"building {source.name}", unit=" products", mininterval=1,
        disable=hidden,
    )  # fmt: skip
    for products in _batches(bar, 512):
        for product, nouns in zip(products, noun_source.many([p.title or "" for p in products]), strict=True):
            index.add(_searchable(product, source.strict))
            _append(texts, coded, product, nouns, content)
            prices.extend((product.prices[0], product.prices[-1]))
            price_counts.append(len(product.prices))
            asins.append(product.asin)
    for writer in (*texts.values(), *coded.values()):
        writer.close()
    save_array(folder, "prices", np.asarray(prices, dtype=np.float64).reshape(-1, 2))
    save_array(folder, "price_counts", np.frombuffer(bytes(price_counts), dtype=np.uint8))
    save_array(folder, "asin_order", np.asarray(sorted(range(len(asins)), key=asins.__getitem__), dtype=np.int32))
    logger.info("writing the index of %s products", f"{len(asins):,}")
    details = index.finish(asins)
    report = source.report.lines()
    for line in report:
        logger.info("%s: %s", source.name, line)
    return {
        "content": content.hexdigest()[:32],
        "products": len(asins),
        "index": details,
        "report": report,
        "source": source.name,
        "source_key": source.key,
    }


def _append(
    texts: dict[str, TextColumnWriter],
    coded: dict[str, _CodedColumnWriter],
    product: Product,
    nouns: list[str],
    content: hashlib._Hash,
) -> None:
    """Write one product; ``content`` takes in what of it can change an episode, but not its nouns."""
    instructions: dict[str, Any] = {}
    if product.instruction is not None:
        instructions["text"] = product.instruction
        instructions["attributes"] = product.instruction_attributes
    if product.human_instructions is not None:
        instructions["human"] = product.human_instructions
    detail = {
        "bullets": product.bullets,
        "attributes": product.attributes,
        "options": product.options,
        "images": product.option_images,
    }
    values = {
        "asin": product.asin,
        "title": product.title or "",
        "description": product.description or "",
        "price_tag": product.price_tag,
        "main_image": product.main_image if isinstance(product.main_image, str) else "",
        "nouns": "\n".join(nouns),
        "detail": json.dumps(detail, ensure_ascii=False, separators=(",", ":")),
        "instructions": json.dumps(instructions, ensure_ascii=False, separators=(",", ":")) if instructions else "",
    }
    for name, text in values.items():
        texts[name].append(text)
    values.update({name: getattr(product, name) or "" for name in _CODED_COLUMNS})
    for name in _CODED_COLUMNS:
        coded[name].append(values[name])
    hashed = [values[name] for name in sorted(values) if name not in ("nouns", "main_image")]
    content.update("\0".join(hashed).encode("utf-8", "surrogatepass"))


def _batches(items: Iterable[Product], size: int) -> Iterable[list[Product]]:
    batch: list[Product] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
