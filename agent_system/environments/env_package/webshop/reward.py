"""The score of a purchase, from 0 to 1.

    total = r_type * (attributes matched + options matched + price kept) / (attributes + options + 1)

``r_type`` says whether the product is of the kind that was asked for, by its search query, its category path and the
nouns of its title.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_system.environments.env_package.webshop.colours import normalise_colour
from agent_system.environments.env_package.webshop.fuzzy import token_set_ratio
from agent_system.environments.env_package.webshop.goals import Goal
from agent_system.environments.env_package.webshop.records import Product

MATCH_THRESHOLD = 85
NO_NOUN_SCORE = 0.2


@dataclass(frozen=True)
class TypeMatch:
    """How alike the kinds of two products are."""

    r_type: float
    query_match: bool
    category_match: bool
    title_score: float


@dataclass(frozen=True)
class Reward:
    """A score and what it is made of."""

    total: float
    type_match: TypeMatch
    attribute_matches: int
    num_attributes: int
    option_matches: int
    num_options: int
    price_kept: bool

    def parts(self) -> dict[str, Any]:
        """The parts under the original's names; ``w_*`` are their weights in the sum."""
        count = self.num_attributes + self.num_options + 1
        parts: dict[str, Any] = {
            "r_type": self.type_match.r_type,
            "r_att": self.attribute_matches / self.num_attributes,
            "w_att": self.num_attributes / count,
            "query_match": self.type_match.query_match,
            "category_match": self.type_match.category_match,
            "title_score": self.type_match.title_score,
        }
        if self.num_options:
            parts["r_option"] = self.option_matches / self.num_options
            parts["w_option"] = self.num_options / count
        parts["r_price"] = self.price_kept
        parts["w_price"] = 1 / count
        return parts


def title_similarity(product_nouns: Sequence[str], goal_nouns: Sequence[str]) -> float:
    """Share of the goal title's nouns that the product's title has; 0.2 if it has none. (The share counts repeats.)"""
    if not goal_nouns:
        return NO_NOUN_SCORE
    return len(set(product_nouns) & set(goal_nouns)) / len(goal_nouns)


def title_type(product_nouns: Sequence[str], goal_nouns: Sequence[str], related: bool = False) -> float:
    """``r_type`` from the titles; ``related`` products match in query or category.

    A similarity below 0.1 overrides such a match.
    """
    similarity = title_similarity(product_nouns, goal_nouns)
    if similarity == 0.0:
        return 0.0
    if similarity < 0.1:
        return 0.1
    return 1.0 if related or similarity > 0.2 else 0.5


def match_type(product: Product, goal: Goal, product_nouns: Sequence[str], goal_nouns: Sequence[str]) -> TypeMatch:
    """Compare the kinds of a product and of what a goal asks for."""
    query_match = product.query == goal.query
    bought = {part.strip() for part in (product.product_category or "").split("›")}
    wanted = {part.strip() for part in goal.product_category.split("›")}
    category_match = len(bought & wanted) >= 2
    r_type = title_type(product_nouns, goal_nouns, query_match or category_match)
    return TypeMatch(r_type, query_match, category_match, title_similarity(product_nouns, goal_nouns))


def count_attributes(product: Product, goal: Goal) -> int:
    """Goal attributes that the product's attributes, title, bullets or description have."""
    title = (product.title or "").lower()
    bullets = " ".join(product.bullets).lower()
    description = (product.description or "").lower()
    matched = 0
    for wanted in goal.attributes:
        similar = any(token_set_ratio(has, wanted) > MATCH_THRESHOLD for has in product.attributes)
        if similar or wanted in title or wanted in bullets or wanted in description:
            matched += 1
    return matched


def count_options(bought: Iterable[str], wanted: Iterable[str | tuple[str, str]]) -> int:
    """Wanted options that a bought value matches, colours reduced first; a pair is compared by its Python text."""
    have = [str(normalise_colour(value)) for value in bought]
    matched = 0
    for option in wanted:
        text = str(normalise_colour(option))
        if any(token_set_ratio(value, text) > MATCH_THRESHOLD for value in have):
            matched += 1
    return matched


def score_purchase(
    product: Product,
    goal: Goal,
    *,
    price: float,
    options: Mapping[str, str],
    product_nouns: Sequence[str],
    goal_nouns: Sequence[str],
) -> Reward:
    """The reward of buying ``product`` with ``options`` (group -> value) at ``price`` for ``goal``.

    Raises:
        TypeError: the goal's price cap is not positive.
        ZeroDivisionError: the goal has no attributes.
    """
    type_match = match_type(product, goal, product_nouns, goal_nouns)
    price_kept = price <= goal.price_upper
    if not goal.price_upper > 0:
        raise TypeError(f"a goal's price cap must be positive, got {goal.price_upper}")
    if not goal.attributes:
        raise ZeroDivisionError("a goal needs at least one attribute")
    attribute_matches = count_attributes(product, goal)
    wanted = list(goal.goal_options.items()) if isinstance(goal.goal_options, dict) else list(goal.goal_options)
    option_matches = count_options(options.values(), wanted)
    count = len(goal.attributes) + len(wanted) + 1
    total = (attribute_matches + option_matches + int(price_kept)) / count * type_match.r_type
    return Reward(total, type_match, attribute_matches, len(goal.attributes), option_matches, len(wanted), price_kept)
