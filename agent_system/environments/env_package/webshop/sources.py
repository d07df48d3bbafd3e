"""Where products come from: the official files, the embedded generator, or lists in memory."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_system.environments.env_package.webshop.generator import iter_generated
from agent_system.environments.env_package.webshop.generator_records import attribute_record, product_record
from agent_system.environments.env_package.webshop.json_stream import (
    DataFileError,
    iter_array,
    iter_object,
)
from agent_system.environments.env_package.webshop.options import PREFIX, ShopOptions
from agent_system.environments.env_package.webshop.records import Entry, LoadReport, Product, read_products
from agent_system.environments.env_package.webshop.storage import code_digest

logger = logging.getLogger(__name__)

EMBEDDED_PRODUCTS = 1000
SMALL_FILES = ("items_shuffle_1000.json", "items_ins_v2_1000.json", "items_human_ins.json")
FULL_FILES = ("items_shuffle.json", "items_ins_v2.json", "items_human_ins.json")
_READ_BYTES = 1 << 22


@dataclass
class ProductSource:
    """Products with a key that changes when they do.

    strict: read as the original does, crashes included (as errors with a name).
    human_goals: matters to strict reading alone.
    """

    name: str
    key: str
    expected: int | None = None
    num_products: int | None = None
    strict: bool = False
    human_goals: bool = False
    report: LoadReport = field(default_factory=LoadReport)

    def entries(self) -> Iterator[Entry]:
        """Raw records, each with its attribute entry and human instructions, in order."""
        raise NotImplementedError

    def products(self) -> Iterator[Product]:
        """Products in order, one at a time."""
        self.report = LoadReport()
        yield from read_products(
            self.entries(),
            num_products=self.num_products,
            strict=self.strict,
            human_goals=self.human_goals,
            source=self.name,
            report=self.report,
        )


def join_by_asin(records: Iterable[Any], attributes: dict[str, Any], human: dict[str, Any]) -> Iterator[Entry]:
    """Each record with what the two mappings have for its asin."""
    for record in records:
        asin = record.get("asin") if isinstance(record, dict) else None
        key = asin if isinstance(asin, str) else None
        yield record, attributes.get(key), human.get(key)


@dataclass(frozen=True)
class ProductFiles:
    """The three files of a shop."""

    products: Path
    attributes: Path
    human: Path

    @classmethod
    def in_folder(cls, folder: Path, use_small: bool) -> ProductFiles:
        """The official names in ``folder``.

        Raises:
            ValueError: one is missing; the message says which and what to change.
        """
        names = SMALL_FILES if use_small else FULL_FILES
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            other = FULL_FILES if use_small else SMALL_FILES
            hint = ""
            if all((folder / name).is_file() for name in other):
                hint = f" (the other set is there: {PREFIX}.use_small={str(not use_small).lower()} reads it)"
            raise ValueError(
                f"{PREFIX}.data_dir={folder} lacks {', '.join(missing)}{hint}; "
                "examples/data_preprocess/webshop_data.py fetches and checks the official files, and without "
                f"{PREFIX}.data_dir the embedded shop is used"
            )
        return cls(*(folder / name for name in names))

    @classmethod
    def beside(cls, products: str | Path, attributes: str | Path | None, human: str | Path | None) -> ProductFiles:
        """A product file with the others given or, under their official names, in the same folder."""
        products = Path(products).expanduser()
        names = SMALL_FILES if products.name == SMALL_FILES[0] else FULL_FILES
        found = cls(
            products,
            products.parent / names[1] if attributes is None else Path(attributes).expanduser(),
            products.parent / names[2] if human is None else Path(human).expanduser(),
        )
        missing = [str(path) for path in (found.products, found.attributes, found.human) if not path.is_file()]
        if missing:
            raise ValueError(f"the shop needs {', '.join(missing)}; give file_path, attr_path and human_attr_path")
        return found


class OfficialFiles(ProductSource):
    """Products of three files in the official schema, read one record at a time."""

    def __init__(
        self,
        files: ProductFiles,
        cache_dir: str | Path,
        *,
        num_products: int | None = None,
        strict: bool = False,
        human_goals: bool = False,
    ) -> None:
        self.files = files
        digests = [file_digest(path, Path(cache_dir)) for path in (files.products, files.attributes, files.human)]
        mode = f"strict human={human_goals}" if strict else "tolerant"
        key = f"files {' '.join(digests)} products {num_products} {mode}"
        super().__init__(str(files.products), key, num_products, num_products, strict, human_goals)

    def entries(self) -> Iterator[Entry]:
        attributes = dict(iter_object(self.files.attributes))
        human = dict(iter_object(self.files.human))
        return join_by_asin(iter_array(self.files.products), attributes, human)


class EmbeddedProducts(ProductSource):
    """Products of the generator."""

    def __init__(self, num_products: int | None, seed: int) -> None:
        count = EMBEDDED_PRODUCTS if num_products is None else num_products
        self._count = count
        self._seed = seed
        generator = code_digest("generator*.py")
        super().__init__("the embedded shop", f"embedded {generator} products {count} seed {seed}", count)

    def entries(self) -> Iterator[Entry]:
        for product in iter_generated(self._count, self._seed):
            yield product_record(product), attribute_record(product), list(product.human) or None


class GivenProducts(ProductSource):
    """Records in memory, in the official schema."""

    def __init__(
        self,
        records: list[Any],
        attributes: dict[str, Any],
        human: dict[str, Any],
        *,
        num_products: int | None = None,
        strict: bool = False,
        human_goals: bool = False,
    ) -> None:
        self._data = (records, attributes, human)
        digest = hashlib.sha256(json.dumps(self._data, sort_keys=False).encode()).hexdigest()
        mode = f"strict human={human_goals}" if strict else "tolerant"
        super().__init__(
            "given records", f"given {digest} products {num_products} {mode}", len(records), num_products, strict,
            human_goals,
        )  # fmt: skip

    def entries(self) -> Iterator[Entry]:
        return join_by_asin(*self._data)


def source_of(options: ShopOptions, files: ProductFiles | None = None) -> ProductSource:
    """The source that ``options`` name, or that of ``files``."""
    if files is None and options.data_dir is None:
        return EmbeddedProducts(options.num_products, options.seed)
    if files is None:
        files = ProductFiles.in_folder(Path(str(options.data_dir)).expanduser(), options.use_small)
    return OfficialFiles(
        files,
        options.cache_path,
        num_products=options.num_products,
        strict=options.original_quirks,
        human_goals=options.human_goals,
    )


def file_digest(path: Path, cache_dir: Path) -> str:
    """SHA-256 of a file, remembered by path, size and time so that gigabytes are not read at every start."""
    stat = path.stat()
    identity = f"{path.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}\n{stat.st_ino}"
    note = cache_dir / "digests" / hashlib.sha256(identity.encode()).hexdigest()[:32]
    try:
        known = note.read_text(encoding="ascii").strip()
        if len(known) == 64:
            return known
    except OSError:
        logger.debug("no remembered digest of %s", path)
    digest = hashlib.sha256()
    try:
        with path.open("rb") as handle:
            while block := handle.read(_READ_BYTES):
                digest.update(block)
    except OSError as error:
        raise DataFileError(f"{path}: cannot be read ({error})") from error
    temporary = note.with_name(f"{note.name}.{os.getpid()}")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(digest.hexdigest(), encoding="ascii")
        os.replace(temporary, note)
    except OSError as error:  # the next start reads the file again
        logger.warning("cannot remember the digest of %s: %s", path, error)
    return digest.hexdigest()
