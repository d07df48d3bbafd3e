"""Rewards, similarities and colours against recordings of the original."""

from __future__ import annotations

import math

import pytest
from webshop_golden import golden, golden_table

from agent_system.environments.env_package.webshop.catalogue import Catalogue
from agent_system.environments.env_package.webshop.colours import normalise_colour
from agent_system.environments.env_package.webshop.fuzzy import token_set_ratio
from agent_system.environments.env_package.webshop.goals import Goal
from agent_system.environments.env_package.webshop.reward import score_purchase


@pytest.mark.parametrize("case", golden("golden_reward.jsonl"), ids=lambda case: f"{case['id']}")
def test_reward(case: dict, golden_catalogue: Catalogue) -> None:
    row = golden_catalogue.row_of(case["asin"])
    assert row is not None
    goal = Goal(**case["goal"])

    def score():
        nouns = golden_table().many([golden_catalogue.title(row), goal.name])
        return score_purchase(
            golden_catalogue.product(row), goal, price=case["price"], options=case["options"],
            product_nouns=nouns[0], goal_nouns=nouns[1],
        )  # fmt: skip

    if "error" in case:
        with pytest.raises(
            {"TypeError": TypeError, "ZeroDivisionError": ZeroDivisionError}[case["error"].split(":")[0]]
        ):
            score()
        return
    reward = score()
    assert math.isclose(reward.total, case["total"], abs_tol=1e-9)
    assert reward.attribute_matches == case["num_attr_matches"]
    assert reward.option_matches == (case["num_option_matches"] or 0)
    parts = reward.parts()
    assert parts.keys() == case["info"].keys()
    for name, value in case["info"].items():
        assert math.isclose(parts[name], value, abs_tol=1e-9), name


def test_token_set_ratio() -> None:
    def text(value: str | list) -> str:
        return str(tuple(value)) if isinstance(value, list) else value

    cases = golden("golden_fuzz.jsonl")
    assert len(cases) > 3000
    for case in cases:
        assert token_set_ratio(text(case["a"]), text(case["b"])) == case["token_set_ratio"], case


def test_colours() -> None:
    cases = golden("golden_normalize.json")
    for value, expected in cases["strings"].items():
        assert normalise_colour(value) == expected
    for case in cases["tuples"]:
        got = normalise_colour(tuple(case["input"]))
        assert (list(got) if isinstance(got, tuple) else got) == case["output"]
