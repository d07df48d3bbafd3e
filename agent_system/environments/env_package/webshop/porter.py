"""Porter stemmer, in the revised form its author published on his site.

The algorithm is that of M.F. Porter, "An algorithm for suffix stripping", Program 14(3), 1980, with the three later
departures that Lucene's stemmer also has: words of one or two letters are left alone, step 2 maps ``bli`` to ``ble``
(the paper: ``abli`` to ``able``) and has one more rule, ``logi`` to ``log``.
"""

from __future__ import annotations

from functools import lru_cache

_VOWELS = frozenset("aeiou")

_STEP2 = {
    "ational": "ate", "tional": "tion", "enci": "ence", "anci": "ance", "izer": "ize", "bli": "ble", "alli": "al",
    "entli": "ent", "eli": "e", "ousli": "ous", "ization": "ize", "ation": "ate", "ator": "ate", "alism": "al",
    "iveness": "ive", "fulness": "ful", "ousness": "ous", "aliti": "al", "iviti": "ive", "biliti": "ble", "logi": "log",
}  # fmt: skip
_STEP3 = {"icate": "ic", "ative": "", "alize": "al", "iciti": "ic", "ical": "ic", "ful": "", "ness": ""}
_STEP4 = (
    "al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou", "ism", "ate", "iti",
    "ous", "ive", "ize",
)  # fmt: skip


def _longest_first(suffixes: list[str]) -> tuple[str, ...]:
    return tuple(sorted(suffixes, key=len, reverse=True))


_STEP2_ORDER = _longest_first(list(_STEP2))
_STEP3_ORDER = _longest_first(list(_STEP3))
_STEP4_ORDER = _longest_first(list(_STEP4))


def _shape(word: str) -> str:
    """``word`` as a string of ``v`` (vowel) and ``c`` (consonant); ``y`` is a vowel after a consonant."""
    out: list[str] = []
    for i, letter in enumerate(word):
        if letter in _VOWELS or (letter == "y" and i > 0 and out[-1] == "c"):
            out.append("v")
        else:
            out.append("c")
    return "".join(out)


def _measure(stem: str) -> int:
    """Number of vowel-to-consonant changes in ``stem``: m in [C](VC)^m[V]."""
    return _shape(stem).count("vc")


def _has_vowel(stem: str) -> bool:
    return "v" in _shape(stem)


def _ends_double_consonant(word: str) -> bool:
    return len(word) >= 2 and word[-1] == word[-2] and _shape(word)[-1] == "c"


def _ends_cvc(word: str) -> bool:
    return len(word) >= 3 and _shape(word)[-3:] == "cvc" and word[-1] not in "wxy"


def _step1(word: str) -> str:
    if word.endswith("s"):
        if word.endswith(("sses", "ies")):
            word = word[:-2]
        elif not word.endswith("ss"):
            word = word[:-1]
    if word.endswith("eed"):
        if _measure(word[:-3]) > 0:
            word = word[:-1]
    else:
        for suffix in ("ed", "ing"):
            if word.endswith(suffix) and _has_vowel(word[: -len(suffix)]):
                word = _repair(word[: -len(suffix)])
                break
    if word.endswith("y") and _has_vowel(word[:-1]):
        word = word[:-1] + "i"
    return word


def _repair(stem: str) -> str:
    """After ``-ed`` or ``-ing`` is gone: put a final ``e`` back, or undouble the last consonant."""
    if stem.endswith(("at", "bl", "iz")):
        return stem + "e"
    if _ends_double_consonant(stem):
        return stem if stem[-1] in "lsz" else stem[:-1]
    if _measure(stem) == 1 and _ends_cvc(stem):
        return stem + "e"
    return stem


def _replace(word: str, order: tuple[str, ...], table: dict[str, str]) -> str:
    """Replace the longest suffix of ``table`` that ``word`` has, if what stands before it has m > 0."""
    for suffix in order:
        if word.endswith(suffix):
            stem = word[: -len(suffix)]
            return stem + table[suffix] if _measure(stem) > 0 else word
    return word


def _step4(word: str) -> str:
    for suffix in _STEP4_ORDER:
        if word.endswith(suffix):
            stem = word[: -len(suffix)]
            allowed = suffix != "ion" or stem.endswith(("s", "t"))
            return stem if allowed and _measure(stem) > 1 else word
    return word


def _step5(word: str) -> str:
    if word.endswith("e"):
        m = _measure(word[:-1])
        if m > 1 or (m == 1 and not _ends_cvc(word[:-1])):
            word = word[:-1]
    if word.endswith("l") and _ends_double_consonant(word) and _measure(word[:-1]) > 1:
        word = word[:-1]
    return word


@lru_cache(maxsize=1 << 18)
def stem(word: str) -> str:
    """The stem of a lower-case ``word``; anything but a to z counts as a consonant."""
    if len(word) <= 2:
        return word
    word = _step1(word)
    if len(word) <= 1:
        return word
    word = _replace(word, _STEP2_ORDER, _STEP2)
    word = _replace(word, _STEP3_ORDER, _STEP3)
    return _step5(_step4(word))
