"""Reading large JSON files one record at a time, with errors that name the file and the record.

The official product file is several gigabytes; only one record of it is in memory at a time. Left out: anything but a
top-level array or object.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

_CHUNK = 1 << 20
_BLANKS = " \t\n\r\ufeff"
_NO_JSON = {  # how files begin that are not JSON texts
    b"\x1f\x8b": "a gzip archive: unpack it first (gunzip)",
    b"PK\x03\x04": "a zip archive: unpack it first",
    b"<": "a web page or XML: the page of a download was saved in place of the file",
    b"version https://git-lfs": "a pointer of Git LFS: fetch the file itself (git lfs pull)",
}
_LONGEST_LITERAL = 16  # characters; a word or an escape that is cut off is found no further from the end


class DataFileError(ValueError):
    """A data file cannot be read; the message names the file and the record."""


class _Reader:
    """A window over a text file that grows until the decoder finds a whole value in it."""

    def __init__(self, handle: TextIO, path: Path) -> None:
        self._handle = handle
        self._path = path
        self._decoder = json.JSONDecoder()
        self._text = ""
        self._position = 0
        self._dropped = 0
        self._ended = False
        self.where = "at its start"

    def _more(self) -> bool:
        """Append a chunk, as large as the window, so that the cost of growing stays linear."""
        if self._ended:
            return False
        kept = self._text[self._position :]
        try:
            chunk = self._handle.read(max(_CHUNK, len(kept)))
        except UnicodeDecodeError as error:
            raise DataFileError(f"{self._path}: {self.where}: not UTF-8 text ({error})") from error
        except OSError as error:
            raise DataFileError(f"{self._path}: {self.where}: cannot be read on ({error})") from error
        if not chunk:
            self._ended = True
            return False
        self._dropped += self._position
        self._text, self._position = kept + chunk, 0
        return True

    def fail(self, reason: str) -> DataFileError:
        at = self._dropped + self._position
        return DataFileError(f"{self._path}: {self.where}: {reason} (character {at:,})")

    def peek(self) -> str:
        """The next character that is not blank, or '' at the end."""
        while True:
            while self._position < len(self._text):
                if self._text[self._position] not in _BLANKS:
                    return self._text[self._position]
                self._position += 1
            if not self._more():
                return ""

    def take(self, expected: str) -> None:
        found = self.peek()
        if found != expected:
            what = repr(found) if found else "the end of the file"
            raise self.fail(f"expected {expected!r}, found {what}; the file is damaged or cut short")
        self._position += 1

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        """Whether the value may only reach past the window, rather than be wrong in the middle of it."""
        return error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _LONGEST_LITERAL

    def value(self) -> Any:
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._position)
            except json.JSONDecodeError as error:
                if self._may_be_cut(error) and self._more():
                    continue
                self._position = min(error.pos, len(self._text))
                raise self.fail(error.msg) from error
            except RecursionError:
                raise self.fail("nested too deeply") from None
            except ValueError as error:  # a number with thousands of digits
                raise self.fail(str(error).partition(";")[0]) from error
            if len(self._text) - end <= 2 and self._more():  # a number may go on: "1" then "5", "1e+" then "5"
                continue
            self._position = end
            return value


@contextmanager
def _reading(path: Path) -> Iterator[_Reader]:
    """A reader of a file.

    Raises:
        DataFileError: the file cannot be opened, or is something else than a JSON text.
    """
    try:
        with path.open("rb") as raw:
            start = raw.read(32).lstrip()
        handle = path.open(encoding="utf-8")
    except OSError as error:
        raise DataFileError(f"{path}: cannot be read ({error})") from error
    with handle:
        if what := next((what for magic, what in _NO_JSON.items() if start.startswith(magic)), None):
            raise DataFileError(f"{path}: not a JSON file but {what}")
        yield _Reader(handle, path)


def iter_array(path: str | Path) -> Iterator[Any]:
    """Elements of the top-level array of a JSON file, in order."""
    with _reading(Path(path)) as reader:
        reader.take("[")
        index = 0
        while reader.peek() != "]":
            reader.where = f"record {index}"
            if index:
                reader.take(",")
            yield reader.value()
            index += 1
        reader.take("]")
        _nothing_more(reader)


def iter_object(path: str | Path) -> Iterator[tuple[str, Any]]:
    """Members of the top-level object of a JSON file, in order."""
    with _reading(Path(path)) as reader:
        reader.take("{")
        index = 0
        while reader.peek() != "}":
            if index:
                reader.take(",")
            reader.where = f"entry {index}"
            key = reader.value()
            if not isinstance(key, str):
                raise reader.fail(f"expected a quoted name, found {key!r}")
            reader.where = f"entry {index} ({key})"
            reader.take(":")
            yield key, reader.value()
            index += 1
        reader.take("}")
        _nothing_more(reader)


def _nothing_more(reader: _Reader) -> None:
    reader.where = "after the last record"
    if found := reader.peek():
        raise reader.fail(f"unexpected {found!r}")
