"""Token-set similarity of two short texts, from 0 to 100.

Words shared by both texts count once, so a text whose words are all in the other scores 100. Ratios are those of the
standard library's ``SequenceMatcher``. Equal to thefuzz 0.19 with plain difflib.
"""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from functools import lru_cache

_LATIN1_UPPER_HALF = dict.fromkeys(range(128, 256))
_NOT_WORD = re.compile(r"\W")


def clean(text: str) -> str:
    """Lower-cased words with single non-word characters as blanks; code points 128 to 255 are dropped."""
    return _NOT_WORD.sub(" ", text.translate(_LATIN1_UPPER_HALF)).lower().strip()


def _ratio(first: str, second: str) -> int:
    """Similarity of two strings: 100 if equal, 0 if one is empty."""
    if first == second:
        return 100
    if not first or not second:
        return 0
    return round(100 * SequenceMatcher(None, first, second).ratio())


@lru_cache(maxsize=1 << 16)
def token_set_ratio(first: str, second: str) -> int:
    """The best similarity among the shared words and the shared words with either rest.

    >>> token_set_ratio("large", "x-large"), token_set_ratio("red", "blue")
    (100, 29)
    """
    first, second = clean(first), clean(second)
    if not first or not second:
        return 0
    left, right = set(first.split()), set(second.split())
    shared = " ".join(sorted(left & right))
    with_left = f"{shared} {' '.join(sorted(left - right))}".strip()
    with_right = f"{shared} {' '.join(sorted(right - left))}".strip()
    return max(_ratio(shared, with_left), _ratio(shared, with_right), _ratio(with_left, with_right))


def matches(first: str, second: str, threshold: int) -> bool:
    """Whether the similarity is above ``threshold``."""
    return token_set_ratio(first, second) > threshold
