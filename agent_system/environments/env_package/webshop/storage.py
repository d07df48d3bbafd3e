"""Files of a built catalogue: memory-mapped NumPy arrays, their checksums, and building them once per machine.

A built folder is immutable. It holds ``.npy`` files and a manifest with their sizes and CRC-32s; it appears under its
final name by one rename, so a reader sees all of it or nothing. ``verified.json`` remembers for which file times the
checksums held, so that opening gigabytes does not read them again; any change of a file brings the full check back.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
VERIFIED = "verified.json"
_ALWAYS_CHECK_BELOW = 64 << 20  # bytes; smaller folders are checked in full at every opening
_HEADER_BYTES = 128
_READ_BYTES = 1 << 22


class DamagedFilesError(RuntimeError):
    """A built folder does not match its manifest."""


@cache
def code_digest(*patterns: str) -> str:
    """Digest of source files of this package, by file name patterns.

    It is part of the key of what they build, so that another version of them builds anew and never reads what it
    would have written in another way.
    """
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in Path(__file__).parent.glob(pattern)}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


class ArrayWriter:
    """Writes a one-dimensional ``.npy`` file whose length is known only at the end."""

    def __init__(self, path: Path, dtype: Any) -> None:
        self.length = 0
        self._dtype = np.dtype(dtype)
        self._path = path
        self._handle = path.open("wb")
        self._handle.write(b"\0" * _HEADER_BYTES)

    def append(self, values: np.ndarray) -> None:
        values = np.ascontiguousarray(values, dtype=self._dtype)
        self._handle.write(values.data)
        self.length += len(values)

    def append_bytes(self, data: bytes) -> None:
        """Append raw bytes to an array of dtype uint8."""
        self._handle.write(data)
        self.length += len(data)

    def close(self) -> None:
        header = {"descr": npy_format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self.length,)}
        text = repr(header).encode("latin1")
        magic = npy_format.magic(1, 0)
        padded = text.ljust(_HEADER_BYTES - len(magic) - 2 - 1) + b"\n"
        self._handle.seek(0)
        self._handle.write(magic + len(padded).to_bytes(2, "little") + padded)
        self._handle.close()


def well_formed(text: str) -> str:
    """``text`` with surrogates joined to characters; those without a partner become U+FFFD.

    JSON's escapes can spell half a character, which no page, prompt or tokenizer can encode.
    """
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class TextColumnWriter:
    """Writes a column of texts: UTF-8 bytes end to end, and where each starts.

    exact: keep surrogates as they are instead of making texts :func:`well_formed`.
    """

    def __init__(self, folder: Path, name: str, exact: bool = True) -> None:
        self._exact = exact
        self._bytes = ArrayWriter(folder / f"{name}.bytes.npy", np.uint8)
        self._offsets = ArrayWriter(folder / f"{name}.offsets.npy", np.int64)
        self._pending: list[int] = [0]

    def append(self, text: str) -> None:
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError:
            data = (text if self._exact else well_formed(text)).encode("utf-8", "surrogatepass")
        self._bytes.append_bytes(data)
        self._pending.append(self._bytes.length)
        if len(self._pending) >= 1 << 16:
            self._flush()

    def _flush(self) -> None:
        self._offsets.append(np.asarray(self._pending, dtype=np.int64))
        self._pending = []

    def close(self) -> None:
        self._flush()
        self._offsets.close()
        self._bytes.close()


class TextColumn:
    """A memory-mapped column of texts; indexing decodes one."""

    __slots__ = ("_bytes", "_offsets", "length")

    def __init__(self, folder: Path, name: str) -> None:
        self._bytes = memoryview(open_array(folder, f"{name}.bytes"))
        self._offsets = memoryview(open_array(folder, f"{name}.offsets"))
        self.length = len(self._offsets) - 1

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> str:
        return str(self._bytes[self._offsets[row] : self._offsets[row + 1]], "utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        return (self[row] for row in range(self.length))


def open_array(folder: Path, name: str) -> np.ndarray:
    """The array of ``folder/name.npy``, memory-mapped and read-only."""
    path = folder / f"{name}.npy"
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DamagedFilesError(f"{path} cannot be read: {error}") from error
    return array.view(np.ndarray)


def save_array(folder: Path, name: str, values: np.ndarray) -> None:
    np.save(folder / f"{name}.npy", values, allow_pickle=False)


def file_crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as handle:
        while block := handle.read(_READ_BYTES):
            crc = zlib.crc32(block, crc)
    return crc


def write_manifest(folder: Path, details: dict[str, Any]) -> None:
    """Record every file of ``folder`` with size and checksum, beside ``details``.

    Large files are written through to the disk first: their checksums are not looked at again at every opening, so a
    power cut must not find them half written under their final name.
    """
    files = {}
    for path in sorted(folder.iterdir()):
        files[path.name] = {"bytes": path.stat().st_size, "crc32": file_crc(path)}
    if sum(entry["bytes"] for entry in files.values()) >= _ALWAYS_CHECK_BELOW:
        for name in files:
            with (folder / name).open("rb") as handle:
                os.fsync(handle.fileno())
    (folder / MANIFEST).write_text(json.dumps({**details, "files": files}, indent=1), encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a built folder, its files checked.

    Raises:
        DamagedFilesError: a file is missing, has another size or another checksum.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        stats = {name: os.stat(folder / name) for name in files}
        wrong = [name for name, entry in files.items() if stats[name].st_size != entry["bytes"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedFilesError(f"{folder}: {error}") from error
    if wrong:
        raise DamagedFilesError(f"{folder}: wrong size of {', '.join(wrong)}")
    stamp = {name: [s.st_size, s.st_mtime_ns, s.st_ino] for name, s in stats.items()}
    small = sum(s.st_size for s in stats.values()) < _ALWAYS_CHECK_BELOW
    if small or _read_stamp(folder) != stamp:
        wrong = [name for name, entry in files.items() if file_crc(folder / name) != entry["crc32"]]
        if wrong:
            raise DamagedFilesError(f"{folder}: wrong checksum of {', '.join(wrong)}")
        if not small:
            _write_stamp(folder, stamp)
    return manifest


def _read_stamp(folder: Path) -> Any:
    try:
        return json.loads((folder / VERIFIED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write_stamp(folder: Path, stamp: dict[str, list[int]]) -> None:
    temporary = folder / f".{VERIFIED}.{os.getpid()}"
    try:
        temporary.write_text(json.dumps(stamp), encoding="utf-8")
        os.replace(temporary, folder / VERIFIED)
    except OSError as error:  # a read-only cache still works, only slower to open
        logger.warning("cannot remember that %s was checked: %s", folder, error)


class FileLock:
    """An exclusive lock between processes that the system frees when its holder dies."""

    def __init__(self, path: Path, timeout: float, waiting_for: str) -> None:
        self._path = path
        self._timeout = timeout
        self._waiting_for = waiting_for
        self._descriptor: int | None = None

    def __enter__(self) -> None:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        start = time.monotonic()
        told = start
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                now = time.monotonic()
            if now - start > self._timeout:
                os.close(self._descriptor)
                raise TimeoutError(
                    f"waited {self._timeout:.0f} s for another process to finish {self._waiting_for} (lock "
                    f"{self._path}); if none is running, delete that file, or raise env.webshop.build_timeout"
                )
            if now - told > 10 or told == start:
                logger.info("waiting for another process that is %s", self._waiting_for)
                told = now + 1e-9
            time.sleep(min(0.25, 0.01 + (now - start) / 10))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def open_or_build(
    root: Path, name: str, build: Callable[[Path], dict[str, Any]], timeout: float, what: str
) -> tuple[Path, dict[str, Any]]:
    """The folder ``root/name`` and its manifest; built by one process if it is missing or damaged.

    Args:
        build: fills an empty folder and returns the manifest's details.
        timeout: seconds to wait for another process that is building.
        what: what is being built, for messages.
    """
    folder = root / name
    with contextlib.suppress(DamagedFilesError):
        return folder, read_manifest(folder)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"env.webshop.cache_dir={root} cannot be made ({error}); name a folder to write to") from error
    if not os.access(root, os.W_OK):
        raise ValueError(f"env.webshop.cache_dir={root} cannot be written to, and {what} is not built there yet")
    try:
        return _build_once(root, name, build, timeout, what)
    except TimeoutError:
        raise
    except OSError as error:  # a full disk, above all
        raise ValueError(f"{what} could not be built in env.webshop.cache_dir={root} ({error})") from error


def _build_once(
    root: Path, name: str, build: Callable[[Path], dict[str, Any]], timeout: float, what: str
) -> tuple[Path, dict[str, Any]]:
    """Build ``root/name`` under its lock, unless another process has done so meanwhile."""
    folder = root / name
    with FileLock(root / f"{name}.lock", timeout, f"building {what}"):
        try:
            return folder, read_manifest(folder)
        except DamagedFilesError as error:
            if folder.exists():
                logger.warning("rebuilding %s: %s", what, error)
        _remove_leftovers(root.glob(f"{name}.building-*"))
        _remove_leftovers(root.glob(f"{name}.damaged-*"))
        _remove_orphans(root)
        temporary = root / f"{name}.building-{os.getpid()}"
        temporary.mkdir()
        try:
            write_manifest(temporary, build(temporary))
            if folder.exists():
                os.replace(folder, root / f"{name}.damaged-{os.getpid()}")
            os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            _remove_leftovers(root.glob(f"{name}.damaged-*"))
        return folder, read_manifest(folder)


def _remove_orphans(root: Path) -> None:
    """Remove unfinished folders of other names whose builder is gone: nobody holds their lock."""
    for path in root.glob("*.building-*"):
        try:
            with FileLock(root / f"{path.name.partition('.building-')[0]}.lock", 0.0, "removing leftovers"):
                shutil.rmtree(path, ignore_errors=True)
        except TimeoutError:
            continue


def _remove_leftovers(paths: Iterable[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
