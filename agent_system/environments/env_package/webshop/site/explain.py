"""A score taken apart for a person: which wishes were met, and how they make the number."""

from __future__ import annotations

from dataclasses import dataclass, replace

from agent_system.environments.env_package.webshop.goals import NO_CAP, Goal
from agent_system.environments.env_package.webshop.records import Product
from agent_system.environments.env_package.webshop.reward import Reward, count_attributes, count_options

__all__ = ["Explanation", "Wish", "explain"]


@dataclass(frozen=True)
class Wish:
    """One thing that the task asked for."""

    sort: str  # attribute, option or price
    text: str
    met: bool
    note: str = ""


@dataclass(frozen=True)
class Explanation:
    """``total = type_factor * met / len(wishes)``; ``type_reasons`` says where the factor comes from."""

    total: float
    wishes: tuple[Wish, ...]
    type_factor: float
    type_reasons: tuple[str, ...]

    @property
    def met(self) -> int:
        return sum(wish.met for wish in self.wishes)


def explain(reward: Reward, goal: Goal, product: Product, options: dict[str, str], price: float) -> Explanation:
    """Take a reward apart with the shop's own rules, wish by wish.

    Args:
        options: bought values by group.
        price: what the shop takes the product to cost; the page may show a range around it.
    """
    wishes = [
        Wish("attribute", text, count_attributes(product, replace(goal, attributes=[text])) == 1)
        for text in goal.attributes
    ]
    wanted = list(goal.goal_options.items()) if isinstance(goal.goal_options, dict) else list(goal.goal_options)
    for option in wanted:
        text = f"{option[0]}: {option[1]}" if isinstance(option, tuple) else str(option)
        wishes.append(Wish("option", text, count_options(options.values(), [option]) == 1))
    if goal.price_upper < NO_CAP:
        text, note = f"below ${goal.price_upper:.2f}", f"it costs ${price:.2f}"
    else:
        text, note = "any price", ""
    wishes.append(Wish("price", text, reward.price_kept, note))
    return Explanation(reward.total, tuple(wishes), reward.type_match.r_type, tuple(_type_reasons(reward)))


def _type_reasons(reward: Reward) -> list[str]:
    match = reward.type_match
    reasons = [
        "the product was found under the same search" if match.query_match else "its own search is another one",
        "the departments agree" if match.category_match else "the departments differ",
        f"{match.title_score:.0%} of the wanted title's nouns are in this title",
    ]
    return reasons
