"""Rewards, similarities and colours against recordings of the original."""

from __future__ import annotations

import math

import pytest
from webshop_golden import golden, golden_table

from agent_system.environments.env_package.webshop import colours
from agent_system.environments.env_package.webshop.catalogue import Catalogue
from agent_system.environments.env_package.webshop.colours import BASE_COLOURS, normalise_colour
from agent_system.environments.env_package.webshop.fuzzy import token_set_ratio
from agent_system.environments.env_package.webshop.goals import Goal
from agent_system.environments.env_package.webshop.reward import score_purchase


@pytest.mark.golden("golden_reward.jsonl")
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


@pytest.mark.golden("golden_fuzz.jsonl", whole=True)
def test_token_set_ratio() -> None:
    def text(value: str | list) -> str:
        return str(tuple(value)) if isinstance(value, list) else value

    cases = golden("golden_fuzz.jsonl")
    assert len(cases) > 3000
    for case in cases:
        assert token_set_ratio(text(case["a"]), text(case["b"])) == case["token_set_ratio"], case


@pytest.mark.golden("golden_normalize.json", whole=True)
def test_colours() -> None:
    cases = golden("golden_normalize.json")
    for value, expected in cases["strings"].items():
        assert normalise_colour(value) == expected
    for case in cases["tuples"]:
        got = normalise_colour(tuple(case["input"]))
        assert (list(got) if isinstance(got, tuple) else got) == case["output"]


def test_colours_that_the_recordings_prove(monkeypatch: pytest.MonkeyPatch) -> None:
    """29 base colours cannot be left out without another answer than the recorded one; the rest is not contradicted."""
    strings = golden("golden_normalize.json")["strings"]
    proved = set()
    for colour in BASE_COLOURS:
        monkeypatch.setattr(colours, "BASE_COLOURS", tuple(c for c in BASE_COLOURS if c != colour))
        if any(normalise_colour(value) != expected for value, expected in strings.items()):
            proved.add(colour)
    assert len(proved) == 29
    assert proved >= {value for text, value in strings.items() if value != text}
    assert list(BASE_COLOURS) == sorted(set(BASE_COLOURS))
