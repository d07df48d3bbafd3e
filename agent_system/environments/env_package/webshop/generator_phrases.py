"""Sentences of the generated shop: titles, descriptions, feature bullets and instructions.

Titles are six to ten words. Nothing here names an attribute that the product does not have, because the shop's reward
looks for attributes in these texts too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from agent_system.environments.env_package.webshop.generator_vocabulary import Attribute, Kind

__all__ = ["bullets", "description", "human_instruction", "synthetic_instruction", "title", "with_article"]

_RANGES = ("Classic", "Premium", "Essential", "Signature", "Original", "Deluxe", "Select", "Everyday")

_DESCRIPTIONS = (
    "{brand} makes this {kind} for {use}.",
    "A {kind} by {brand} that works well for {use}.",
    "Made for {use} and built to last.",
    "Our customers like it for {use}. Ships in a plain box.",
    "Good for {use} and for gifts. By {brand}.",
)
_BULLETS = ("{attribute} for everyday comfort", "{attribute} design", "{attribute} and made with care", "{attribute}")
_PLAIN_BULLETS = ("Friendly customer service", "Tested before it ships", "Makes a thoughtful gift", "One year warranty")

# {attrs}: "slip resistant, rubber sole"; {clause}: "is slip resistant and has rubber sole"; {item}: "a hoodie"
_SYNTHETIC = (
    "Find me {attrs} {kind}",
    "I need {attrs} {kind}",
    "Show me {attrs} {kind}",
    "I am looking for {attrs} {kind}",
    "I want to buy {attrs} {kind}",
    "Please find {attrs} {kind}",
)
_HUMAN = (
    "i need {item} that {clause}{options}",
    "i am looking for {attrs} {kind}{options}",
    "find me {item} which {clause}{options}",
    "i want to buy {attrs} {kind}{options}",
    "show me {kind} - {attrs}{options}",
    "can you get me {item} that {clause}{options}",
    "i would like {attrs} {kind}{options}, please",
    "my old one broke, so i need {attrs} {kind}{options}",
    "help me find {kind} that {clause}{options}",
)


def with_article(noun: str) -> str:
    """``"a hoodie"``, ``"an area rug"``, and plurals as they are (``"running shoes"``)."""
    if noun.endswith("s") and not noun.endswith("ss"):
        return noun
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def title(brand: str, kind: Kind, attributes: Sequence[Attribute], rng: random.Random) -> str:
    """A product title of about six to ten words: brand, attributes and kind, in one of several orders."""
    texts = [attribute.text for attribute in attributes]
    rng.shuffle(texts)
    words = sum(len(text.split()) for text in texts) + len(kind.name.split()) + 1
    name = kind.name
    if words < 6 or (words < 8 and rng.random() < 0.4):
        name = f"{rng.choice(_RANGES)} {name}"
    front = " ".join(texts[:-1])
    form = rng.randrange(4)
    if form == 0:
        line = f"{brand} {' '.join(texts)} {name}"
    elif form == 1:
        line = f"{brand} {front} {name} {texts[-1]}"
    elif form == 2:
        line = f"{name} by {brand}, {', '.join(texts)}"
    else:
        line = f"{brand} {name}, {', '.join(texts)}"
    return _capitalise(line)


def _capitalise(line: str) -> str:
    return " ".join(word if word in ("by", "and", "to", "in") else word[0].upper() + word[1:] for word in line.split())


def description(brand: str, kind: Kind, rng: random.Random) -> str:
    """One or two sentences that name no attribute."""
    return rng.choice(_DESCRIPTIONS).format(brand=brand, kind=kind.name, use=rng.choice(kind.category.uses))


def bullets(attributes: Sequence[Attribute], num_title_attributes: int, rng: random.Random) -> tuple[str, ...]:
    """Two or three features: what the title leaves out first, then one of the title's or a plain remark."""
    hidden = [attribute.text for attribute in attributes[num_title_attributes:]]
    shown = [attribute.text for attribute in attributes[:num_title_attributes]]
    lines = [rng.choice(_BULLETS).format(attribute=text).capitalize() for text in hidden]
    if len(lines) < 2:
        lines.append(rng.choice(_BULLETS).format(attribute=rng.choice(shown)).capitalize())
    if len(lines) < 3:
        lines.append(rng.choice(_PLAIN_BULLETS))
    return tuple(lines)


def _clause(attributes: Sequence[Attribute]) -> str:
    """``"is slip resistant and has rubber sole"``; plural nouns take the same form, as hurried shoppers write."""
    states = [attribute.text for attribute in attributes if not attribute.is_thing]
    things = [attribute.text for attribute in attributes if attribute.is_thing]
    parts = []
    if states:
        parts.append("is " + " and ".join(states))
    if things:
        parts.append("has " + " and ".join(things))
    return " and ".join(parts)


def synthetic_instruction(kind: str, attributes: Sequence[Attribute], rng: random.Random) -> str:
    """A sentence without a full stop: the shop appends the options and the price cap to it."""
    attrs = ", ".join(attribute.text for attribute in attributes)
    return rng.choice(_SYNTHETIC).format(attrs=attrs, kind=kind)


def human_instruction(
    kind: str, attributes: Sequence[Attribute], options: Mapping[str, str], rng: random.Random
) -> str:
    """What a shopper types: attributes in two ways, options named or just mentioned, many templates."""
    attrs = ", ".join(attribute.text for attribute in attributes)
    if len(attributes) > 1 and rng.random() < 0.5:
        attrs = " and ".join(attrs.rsplit(", ", 1))
    named = rng.random() < 0.6
    pieces = [f"{group} {value}" if named else value for group, value in options.items()]
    phrase = rng.choice((" in {}", ", {}", " with {}")).format(" and ".join(pieces)) if pieces else ""
    sentence = rng.choice(_HUMAN).format(
        item=with_article(kind), kind=kind, attrs=attrs, clause=_clause(attributes), options=phrase
    )
    return sentence + rng.choice(("", "", "."))
