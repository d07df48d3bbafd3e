"""Nouns of product titles, which decide whether two products count as the same type."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from pathlib import Path
from typing import Protocol

logger = logging.getLogger(__name__)


class NounSource(Protocol):
    """Gives the lower-cased nouns of titles, in order, repeats kept. ``key`` changes when its answers may."""

    key: str

    def many(self, titles: list[str]) -> list[list[str]]:
        """Nouns of each title."""
        ...


_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")
_FUNCTION_WORDS = """
a all an and any are as at be but by each for from has have in into is it its more no non not of off on one or
out over per so than that the their this to two up very with without you your
"""
_NOT_NOUNS = frozenset(_FUNCTION_WORDS.split())


class LexiconNouns:
    """Words that are no function words."""

    key = "rule 1"

    def many(self, titles: list[str]) -> list[list[str]]:
        return [[w for w in _WORD.findall(title.lower()) if w not in _NOT_NOUNS] for title in titles]


class TableNouns:
    """A recorded table, with another source for titles that it does not have."""

    def __init__(self, table: dict[str, list[str]], fallback: NounSource) -> None:
        self._table = table
        self._fallback = fallback
        digest = hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:16]
        self.key = f"table {digest} else {fallback.key}"

    def many(self, titles: list[str]) -> list[list[str]]:
        unknown = [title for title in titles if title not in self._table]
        found = dict(zip(unknown, self._fallback.many(unknown), strict=True)) if unknown else {}
        return [self._table[title] if title in self._table else found[title] for title in titles]


def noun_source(name: str) -> NounSource:
    """The source that ``env.webshop.noun_source`` names."""
    if name in ("auto", "lexicon"):
        return LexiconNouns()
    path = Path(name).expanduser()
    if path.is_file():
        return TableNouns(json.loads(path.read_text(encoding="utf-8")), LexiconNouns())
    raise ValueError(f"env.webshop.noun_source must be auto, lexicon, spacy or the path of a JSON file, got {name!r}")
