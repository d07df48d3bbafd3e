"""A small noun tagger for product titles.

The original asks spaCy's small English model which words of a title are nouns. This module answers the same question
without it: a linear classifier over hashed features of a word and its neighbours, trained on what that model says about
made-up titles (``benchmarks/webshop_nouns.py`` trains it and reports the agreement). Its weights are a file of 190 kB;
a title takes less than 0.1 ms.

Left out: every part of speech but noun and proper noun together, and all languages but English.
"""

from __future__ import annotations

import re
import zlib
from functools import lru_cache
from pathlib import Path

import numpy as np

WEIGHTS = Path(__file__).with_name("noun_weights.npz")
BITS = 18  # 2^18 hashed features

_OPENING = "([{<\"'“‘`$#*&@~|!?,;:.…-–—+=/\\"
_CLOSING = ")]}>\"'”’`,;:!?…|*%°™®©~"
_UNIT = re.compile(
    r"(?<=[0-9])(km|m|cm|mm|nm|yd|in|ft|kg|g|mg|lb|oz|mph|mb|MB|kb|KB|gb|GB|tb|TB|T|G|M|K|%)$",
)
_INSIDE = re.compile(
    r"(?<=[^\W_])(-|–|—|/|[:<>=])(?=[^\W\d_])|(?<=[^\W\d_])(,)(?=[^\W\d_])|(?<=[a-z])(\.)(?=[A-Z])|(…|\.\.+)"
)
_WORD_PIECES = re.compile(r"\S+|\s+")


def split_title(title: str) -> list[str]:
    """Words and marks of a title, much as spaCy's English tokeniser has them.

    >>> split_title("Women's T-Shirt, 4K (2 Pack)")
    ['Women', "'s", 'T', '-', 'Shirt', ',', '4', 'K', '(', '2', 'Pack', ')']
    """
    tokens: list[str] = []
    for piece in _WORD_PIECES.findall(title):
        if not piece.isspace():
            tokens.extend(_split_piece(piece))
    return tokens


@lru_cache(maxsize=1 << 16)
def _split_piece(piece: str) -> tuple[str, ...]:
    before: list[str] = []
    after: list[str] = []
    while len(piece) > 1:
        if piece[0] in _OPENING and not re.match(r"[-+.]?\d", piece):
            before.append(piece[0])
            piece = piece[1:]
        elif piece[-2:].lower() in ("'s", "’s") and len(piece) > 2:
            after.append(piece[-2:])
            piece = piece[:-2]
        elif piece[-1] in _CLOSING or (piece[-1] == "." and len(piece) > 2 and piece[-2].islower()):
            after.append(piece[-1])
            piece = piece[:-1]
        elif unit := _UNIT.search(piece):
            after.append(unit.group())
            piece = piece[: unit.start()]
        else:
            break
    middle = [part for part in _INSIDE.split(piece) if part]
    return (*before, *middle, *reversed(after))


@lru_cache(maxsize=1 << 16)
def _shape(word: str) -> str:
    """A coarse form: letters, digits, case."""
    if word.isalpha():
        if word.islower():
            return "x"
        if word.isupper():
            return "X" if len(word) == 1 else "XX"
        return "Xx" if word[0].isupper() and word[1:].islower() else "xX"
    if word.isdigit():
        return "d"
    if any(ch.isalnum() for ch in word):
        return ("d" if word[0].isdigit() else "X" if word[0].isupper() else "x") + "m"
    return word[:2]


def features(tokens: list[str]) -> list[list[str]]:
    """The feature names of every token."""
    low = ["<s>", "<s>", *(token.lower() for token in tokens), "</s>", "</s>"]
    shape = ["<", "<", *(_shape(token) for token in tokens), ">", ">"]
    words = [s for s in shape if s[0] in "xX"]
    capital = "C" if words and sum(s[0] == "X" for s in words) * 3 > len(words) * 2 else "c"
    upper = "U" if words and sum(s == "XX" for s in words) * 2 > len(words) else "u"
    found = []
    for i in range(2, len(tokens) + 2):
        w, s, p, n = low[i], shape[i], low[i - 1], low[i + 1]
        found.append(
            [
                f"w{w}",
                f"W{w}|{s}|{upper}",
                f"3{w[-3:]}|{s}",
                f"2{w[-2:]}|{s}",
                f"4{w[-4:]}",
                f"b{w[:3]}",
                f"s{s}{capital}{upper}",
                f"p{p}|{s}",
                f"n{n}|{s}",
                f"pw{p}|{w}",
                f"nw{w}|{n}",
                f"ps{shape[i - 1]}|{s}|{shape[i + 1]}",
                f"p3{p[-3:]}|{w[-3:]}",
                f"n3{w[-3:]}|{n[-3:]}",
                f"q{low[i - 2]}|{s}",
                f"m{low[i + 2]}|{s}",
                f"pn{p}|{n}",
                f"ss{shape[i - 2]}|{shape[i - 1]}|{s}|{shape[i + 1]}|{shape[i + 2]}",
                f"l{min(i - 2, 3)}|{s}|{capital}",
            ]  # fmt: skip
        )
    return found


@lru_cache(maxsize=1 << 18)
def feature_id(name: str) -> int:
    return zlib.crc32(name.encode("utf-8", "surrogatepass")) & ((1 << BITS) - 1)


class NounTagger:
    """Linear classifier: a word is a noun when its features' weights sum to more than minus the bias."""

    def __init__(self, weights: np.ndarray, bias: float) -> None:
        """``weights``: ``(2^BITS,)`` numbers."""
        self._weights: list[float] = np.asarray(weights, dtype=np.float64).tolist()
        self._bias = float(bias)

    @classmethod
    def load(cls, path: Path = WEIGHTS) -> NounTagger:
        with np.load(path) as saved:
            return cls(saved["weights"].astype(np.float64) * float(saved["scale"]), float(saved["bias"]))

    def nouns(self, title: str) -> list[str]:
        """Lower-cased nouns of a title, in order, repeats kept."""
        tokens = split_title(title)
        weights = self._weights
        return [
            token.lower()
            for token, names in zip(tokens, features(tokens), strict=True)
            if sum([weights[feature_id(name)] for name in names]) + self._bias > 0
        ]
