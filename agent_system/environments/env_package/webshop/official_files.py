"""Getting and checking the official WebShop files: resumable downloads with checksums, and a report on what is in them.

``examples/data_preprocess/webshop_data.py`` is the command line of this module. Files come from any place the user
names; none is built in. Left out: hosts that hide a file behind a web page (the error says so).
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import json
import logging
import math
import os
import re
import shutil
import statistics
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from tqdm import tqdm

from agent_system.environments.env_package.webshop.json_stream import DataFileError, iter_array, iter_object
from agent_system.environments.env_package.webshop.records import NO_ATTRIBUTES, LoadReport, Product, read_products
from agent_system.environments.env_package.webshop.sources import join_by_asin

__all__ = ["DownloadError", "FolderReport", "check_folder", "download", "file_sha256"]

logger = logging.getLogger(__name__)

_BLOCK = 1 << 20
_ATTEMPTS = 5
_TIMEOUT_S = 60.0  # without a byte
VALIDATION_GOALS = 500


class DownloadError(ValueError):
    """A file could not be had; the message says from where and what to do."""


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while block := handle.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def download(
    url: str,
    target: Path,
    sha256: str | None = None,
    *,
    attempts: int = _ATTEMPTS,
    timeout_s: float = _TIMEOUT_S,
    pause_s: float = 1.0,
) -> Path:
    """Fetch ``url`` to ``target``; an interrupted download goes on where it stopped, in this call or the next.

    The bytes collect in ``<target>.part`` beside a note of what they are a part of; the file gets its name when it is
    complete and, if ``sha256`` is given, has that checksum.

    Args:
        sha256: expected checksum, hexadecimal. A target that is there already is kept if it matches (or none is given).
        attempts: connections to try, each going on from the last; ``pause_s`` doubles between them.
        timeout_s: longest silence of a connection.

    Raises:
        DownloadError: the server refuses, stays silent, sends a web page, the checksum differs, the file cannot be
            written, or another process is fetching it.
    """
    _check_arguments(url, sha256)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and (sha256 is None or file_sha256(target) == sha256.lower()):
        logger.info("%s is there already", target)
        return target
    part = target.with_name(target.name + ".part")
    with _only_fetcher(part):
        _fetch(url, part, attempts, timeout_s, pause_s)
        _verify(url, part, sha256)
        os.replace(part, target)
        _note_of(part).unlink(missing_ok=True)
    return target


def _check_arguments(url: str, sha256: str | None) -> None:
    """Refuse what no server could answer, before anything is fetched."""
    try:
        parts = urllib.parse.urlsplit(url)
        usable = parts.scheme == "file" or (parts.scheme in ("http", "https") and parts.hostname and parts.port != 0)
    except ValueError:
        usable = False
    if not usable or re.search(r"[\x00-\x20\x7f]", url):
        raise DownloadError(
            f"{url!r} is not a url: it should start with http://, https:// or file:// and hold no spaces (%20)"
        )
    if sha256 is not None and not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise DownloadError(f"{sha256!r} is not a SHA-256 checksum: that has 64 hexadecimal digits")


@contextmanager
def _only_fetcher(part: Path) -> Iterator[None]:
    """Held while one process writes ``part``; the system frees it when that process dies.

    Raises:
        DownloadError: another process holds it.
    """
    lock = part.with_name(part.name + ".lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise DownloadError(f"another process is fetching {part}: wait for it to end") from None
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _fetch(url: str, part: Path, attempts: int, timeout_s: float, pause_s: float) -> None:
    """Fill ``part`` over as many connections as it takes, ``attempts`` at most."""
    for attempt in range(attempts):
        try:
            _fetch_rest(url, part, timeout_s)
            break
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise DownloadError(f"{url}: the server answers {error.code} {error.reason}") from error
            reason: Exception = error
        except http.client.InvalidURL as error:
            raise DownloadError(f"{url!r} is not a url: {error}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = error
        if attempt + 1 == attempts:
            have = part.stat().st_size if part.exists() else 0
            raise DownloadError(
                f"{url}: no luck in {attempts} attempts ({reason}); the {have:,} bytes there are stay in {part}, "
                "run the same command again to go on"
            )
        logger.warning("%s: %s; trying again", url, reason)
        time.sleep(pause_s * 2**attempt)


def _note_of(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _read_note(part: Path, url: str) -> dict[str, str]:
    """What is known of a partial file; empty when it is not a part of this url or cannot be continued safely."""
    try:
        note = json.loads(_note_of(part).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    known = isinstance(note, dict) and all(isinstance(value, str) for value in note.values())
    return note if known and note.get("url") == url and part.exists() else {}


def _fetch_rest(url: str, part: Path, timeout_s: float) -> None:
    """One connection: ask for what is missing (all of it, if the server's file has changed) and append it."""
    note = _read_note(part, url)
    have = part.stat().st_size if note else 0
    request = urllib.request.Request(url, headers={"User-Agent": "webshop-data", "Accept-Encoding": "identity"})
    if have and note.get("validator"):
        request.add_header("Range", f"bytes={have}-")
        request.add_header("If-Range", note["validator"])
    try:
        response = urllib.request.urlopen(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        if str(have) == note.get("size"):
            return  # nothing is missing
        part.unlink()
        raise ConnectionError("the server has less than was fetched before") from error
    with response:
        if "text/html" in response.headers.get("Content-Type", ""):
            raise DownloadError(
                f"{url} answers with a web page, not a file. Fetch the file with a browser and check its folder instead"
            )
        _append(response, part, url, have if _continues(response, have) else 0, timeout_s)


def _continues(response: Any, have: int) -> bool:
    """Whether the answer is the part that was asked for."""
    header = response.headers.get("Content-Range", "")
    return getattr(response, "status", None) == 206 and header.startswith(f"bytes {have}-")


def _append(response: Any, part: Path, url: str, have: int, timeout_s: float) -> None:
    length = response.headers.get("Content-Length", "")
    size = have + int(length) if re.fullmatch("[0-9]{1,18}", length) else None
    free = shutil.disk_usage(part.parent).free
    if size is not None and size - have > free:
        raise DownloadError(f"{url} needs {size - have:,} more bytes, {part.parent} has {free:,} free")
    etag = response.headers.get("ETag", "")
    validator = etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified", "")
    note = {"url": url, "validator": validator, "size": str(size if size is not None else -1)}
    with (
        _open_part(part, have, note) as handle,
        tqdm(
            total=size, initial=have, desc=part.name.removesuffix(".part"), unit="B", unit_scale=True, disable=None
        ) as bar,
    ):
        while block := response.read(_BLOCK):
            _write_all(handle, block)
            bar.update(len(block))
            have += len(block)
    if size is not None and have < size:
        raise ConnectionError(f"the connection ended after {have:,} of {size:,} bytes")


def _open_part(part: Path, have: int, note: dict[str, str]) -> FileIO:
    """The partial file, to go on after ``have`` bytes; emptied before the note says what the new ones are a part of."""
    try:
        handle = FileIO(part, "a" if have else "w")
        _note_of(part).write_text(json.dumps(note), encoding="utf-8")
    except OSError as error:
        raise DownloadError(f"{part} cannot be written ({error})") from error
    return handle


def _write_all(handle: FileIO, block: bytes) -> None:
    """Write a block. An error here is the disk's and not the connection's: trying again would not help."""
    rest = memoryview(block)
    while rest:
        try:
            rest = rest[handle.write(rest) :]
        except OSError as error:
            raise DownloadError(
                f"{handle.name} cannot be written ({error}); what is there stays, run the same command again to go on"
            ) from error


def _verify(url: str, part: Path, sha256: str | None) -> None:
    if sha256 is None:
        return
    found = file_sha256(part)
    if found != sha256.lower():
        part.unlink()
        _note_of(part).unlink(missing_ok=True)
        raise DownloadError(f"{url}: the checksum is {found}, expected {sha256.lower()}; the file was removed")


@dataclass
class FolderReport:
    """What a set of official files holds.

    ``files`` maps a name to bytes and SHA-256; ``problems`` are lines a person should read; ``repairs`` and ``skipped``
    count what tolerant reading does, by reason. Goals are counted as the shop makes them.
    """

    folder: str
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    products: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    repairs: dict[str, int] = field(default_factory=dict)
    categories: dict[str, int] = field(default_factory=dict)
    without_attributes: int = 0
    with_options: int = 0
    with_price_range: int = 0
    median_price: float = 0.0
    synthetic_goals: int = 0
    human_goals: int = 0
    problems: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report for a person."""
        found = [f"{self.folder}:"]
        found += [f"  {name}: {info['bytes']:,} bytes, sha256 {info['sha256']}" for name, info in self.files.items()]
        top = ", ".join(f"{name} {count:,}" for name, count in list(self.categories.items())[:8])
        median = f"${self.median_price:,.2f}"
        found += [
            f"  {self.products:,} products in {len(self.categories)} categories ({top})",
            f"  {self.with_options:,} with options, {self.with_price_range:,} with a price range, median {median}",
            f"  {self.without_attributes:,} without attributes",
            f"  {self.synthetic_goals:,} synthetic goals, {self.human_goals:,} human goals",
        ]
        found += [f"  {count:,} records skipped: {reason}" for reason, count in self.skipped.items()]
        found += [f"  {count:,} fields repaired: {reason}" for reason, count in self.repairs.items()]
        found += [f"  PROBLEM: {problem}" for problem in self.problems]
        return found

    def to_dict(self) -> dict[str, Any]:
        """The report for a program."""
        return asdict(self)


def check_folder(
    products_path: Path, attributes_path: Path, human_path: Path, num_products: int | None = None
) -> FolderReport:
    """Read the three files record by record and count what the shop will make of them.

    Raises:
        DataFileError: a file is not what it should be; the message names the file and the record.
    """
    report = FolderReport(str(products_path.parent))
    for path in (products_path, attributes_path, human_path):
        if path.stat().st_size == 0:
            raise DataFileError(f"{path}: the file is empty; fetch it again")
        report.files[path.name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    attributes = dict(iter_object(attributes_path))
    human = dict(iter_object(human_path))
    load = LoadReport()
    entries = join_by_asin(iter_array(products_path), attributes, human)
    products = read_products(entries, num_products=num_products, source=str(products_path), report=load)
    asins = _count_products(report, tqdm(products, desc="checking", unit=" products", disable=None))
    report.skipped = dict(load.skipped.most_common())
    report.repairs = {reason: count for reason, count in load.repaired.most_common() if count}
    unknown = sum(asin not in asins for asin in human)
    if unknown:
        report.problems.append(f"{unknown:,} asins of {human_path.name} have no product (normal for the small set)")
    _judge(report)
    return report


def _count_products(report: FolderReport, products: Iterable[Product]) -> set[str]:
    categories: Counter[str] = Counter()
    prices: list[float] = []
    asins: set[str] = set()
    for product in products:
        asins.add(product.asin)
        categories[product.category or "(none)"] += 1
        prices.append(product.prices[0])
        report.without_attributes += product.attributes == [NO_ATTRIBUTES]
        report.with_options += bool(product.options)
        report.with_price_range += len(product.prices) == 2
        if product.instruction is not None:
            report.synthetic_goals += math.prod(len(values) for values in product.options.values())
        instructions = product.human_instructions or []
        report.human_goals += sum(bool(entry["instruction_attributes"]) for entry in instructions)
    report.products = len(asins)
    report.categories = dict(categories.most_common())
    report.median_price = statistics.median(prices) if prices else 0.0
    return asins


def _judge(report: FolderReport) -> None:
    if report.products == 0:
        report.problems.append("there is no usable product")
    for kind, count in (("synthetic", report.synthetic_goals), ("human", report.human_goals)):
        if count <= VALIDATION_GOALS:
            report.problems.append(
                f"only {count:,} {kind} goals: {VALIDATION_GOALS} are for validation, which leaves none to train on "
                f"(env.webshop.human_goals={'true' if kind == 'human' else 'false'} needs more products)"
            )
