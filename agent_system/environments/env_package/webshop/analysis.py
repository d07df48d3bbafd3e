"""Text analysis of the search engine: what Lucene 8's English analyser makes of a text.

Word segmentation by the rules of Unicode's annex 29, possessive ``'s`` dropped, lower case, the 33 English stop words
dropped, Porter stems. Left out: Lucene's type labels of tokens, which the shop does not use.

Most text is ASCII and takes a short pattern of the standard library; anything else takes the full pattern, written
with the word-break classes of the ``regex`` package.
"""

from __future__ import annotations

import re
from functools import lru_cache

import regex

from agent_system.environments.env_package.webshop.porter import stem

MAX_TOKEN_LENGTH = 255  # UTF-16 code units; longer tokens are cut

_STOP_WORD_LIST = """
a an and are as at be but by for if in into is it no not of on or such that the their then there these they this
to was will with
"""
STOP_WORDS = frozenset(_STOP_WORD_LIST.split())

_ASCII_TOKEN = re.compile(
    r"[A-Za-z0-9_]+(?:(?:(?<=[A-Za-z])[.':](?=[A-Za-z])|(?<=[0-9])[.',;](?=[0-9]))[A-Za-z0-9_]+)*"
)


def _unicode_pattern() -> regex.Pattern[str]:
    """Annex 29 words as Lucene's grammar has them, each class followed by what extends it (rule WB4)."""
    ext = r"[\p{WB=Extend}\p{WB=Format}\p{WB=ZWJ}]*+"
    extend = rf"(?:\p{{WB=ExtendNumLet}}{ext})"
    numeric = rf"(?:[\p{{WB=Numeric}}[\p{{Block=Halfwidth_And_Fullwidth_Forms}}&&\p{{Nd}}]]{ext})"
    katakana = rf"(?:\p{{WB=Katakana}}{ext})"
    letter = rf"(?:[\p{{WB=ALetter}}\p{{WB=Hebrew_Letter}}]{ext})"
    hebrew = rf"(?:\p{{WB=Hebrew_Letter}}{ext})"
    single_quote = rf"(?:\p{{WB=Single_Quote}}{ext})"
    double_quote = rf"(?:\p{{WB=Double_Quote}}{ext})"
    mid_letter = rf"(?:[\p{{WB=MidLetter}}\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}]{ext})"
    mid_number = rf"(?:[\p{{WB=MidNum}}\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}]{ext})"

    katakana_run = rf"{katakana}(?:{extend}*+{katakana})*+"
    number_run = rf"{numeric}(?:(?:{extend}*|{mid_number}){numeric})*"
    letter_run = rf"{letter}(?:(?:{extend}*|{mid_letter}){letter})*"
    hebrew_run = rf"{hebrew}(?:{double_quote}{hebrew}|{single_quote})"
    mixed_run = rf"(?:{hebrew_run}|{number_run}|{letter_run})+"
    word = rf"{extend}*(?:{katakana_run}|{mixed_run})(?:{extend}+(?:{katakana_run}|{mixed_run}))*{extend}*"

    complex_context = rf"(?:\p{{LB=Complex_Context}}{ext})++"
    ideograph = rf"\p{{Script=Han}}{ext}"
    hiragana = rf"\p{{Script=Hiragana}}{ext}"

    modifier = r"\p{Emoji_Modifier}"
    flag = rf"\p{{Regional_Indicator}}{ext}\p{{Regional_Indicator}}{ext}"
    keycap = r"[0-9#*]\uFE0F?\u20E3"
    tag_sequence = r"\U0001F3F4[\U000E0061-\U000E007A]{2}[\U000E0030-\U000E0039\U000E0061-\U000E007A]{1,3}\U000E007F"
    element = rf"(?:\p{{Extended_Pictographic}}(?:\uFE0F|{modifier})?)"
    emoji = rf"(?:{tag_sequence}|{keycap}|{flag}|{element}(?:\u200D{element})*{ext})"
    return regex.compile(rf"{emoji}|{word}|{complex_context}|{ideograph}|{hiragana}", regex.V1)


_UNICODE_TOKEN = _unicode_pattern()


def _utf16_length(text: str) -> int:
    return len(text) + sum(ch > "\uffff" for ch in text)


def _window_end(text: str, start: int) -> int:
    """The end of the longest piece of ``text`` from ``start`` that fits the token buffer."""
    units, end = 0, start
    while end < len(text) and units + (2 if text[end] > "\uffff" else 1) <= MAX_TOKEN_LENGTH:
        units += 2 if text[end] > "\uffff" else 1
        end += 1
    return end


def _is_word(token: str) -> bool:
    return not token.isascii() or token.strip("_") != ""


def split_words(text: str) -> list[str]:
    """Tokens of ``text`` before any filter, each of at most 255 UTF-16 units."""
    if text.isascii():
        pattern = _ASCII_TOKEN
        tokens: list[str] = pattern.findall(text)
    else:
        pattern = _UNICODE_TOKEN
        tokens = pattern.findall(text)
    if any(len(token) > MAX_TOKEN_LENGTH // 2 and _utf16_length(token) > MAX_TOKEN_LENGTH for token in tokens):
        tokens = _cut_long_words(text, pattern)
    return [token for token in tokens if token[0] != "_" or _is_word(token)]


def _cut_long_words(text: str, pattern: re.Pattern[str] | regex.Pattern[str]) -> list[str]:
    """Tokens of a text with over-long words: inside those, no match sees further than the token buffer."""
    tokens = []
    for word in pattern.finditer(text):
        position, end = word.span()
        if _utf16_length(word.group()) <= MAX_TOKEN_LENGTH:
            tokens.append(word.group())
            continue
        while position < end:
            piece = pattern.match(text, position, min(_window_end(text, position), end))
            if piece is None:
                position += 1
            else:
                tokens.append(piece.group())
                position = piece.end()
    return tokens


def _lower(token: str) -> str:
    """Lower case code point by code point: no context rule for sigma, and one letter stays one letter."""
    if token.isascii():
        return token.lower()
    return "".join(low if len(low := ch.lower()) == 1 else low[0] for ch in token)


@lru_cache(maxsize=1 << 18)
def normalise_token(token: str) -> str | None:
    """The index term of one token, or None for a stop word."""
    if len(token) >= 2 and token[-1] in "sS" and token[-2] in "'\u2019\uff07":
        token = token[:-2]
    token = _lower(token)
    return None if token in STOP_WORDS else stem(token)


def analyse(text: str) -> list[str]:
    """Index terms of ``text`` in order, repeats kept.

    >>> analyse("The women's running shoes, size 7.5")
    ['women', 'run', 'shoe', 'size', '7.5']
    """
    return [term for token in split_words(text) if (term := normalise_token(token)) is not None]
