"""Loading and goal lists against recordings of the original."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from webshop_golden import golden, golden_table

from agent_system.environments.env_package.webshop.catalogue import Catalogue, index_text
from agent_system.environments.env_package.webshop.goals import SHUFFLE_SEED, GoalSeeding, build_goals
from agent_system.environments.env_package.webshop.records import Product, RecordError
from agent_system.environments.env_package.webshop.sources import GivenProducts
from agent_system.environments.env_package.webshop.text_env import WebAgentTextEnv

VARIANTS = golden("golden_goals.json")["variants"]
FINAL = golden("golden_goals.json")["final_goals"]


def _source(case: dict) -> GivenProducts:
    data = case["input"]
    return GivenProducts(
        data["products"], data["attributes"], data["human"], num_products=case["num_products"], strict=True,
        human_goals=case["human_goals"],
    )  # fmt: skip


def _as_original(product: Product, human: bool) -> dict:
    """A product under the original's keys."""
    shown = {
        "asin": product.asin, "Title": product.title, "Description": product.description,
        "BulletPoints": product.bullets, "Price": product.price_tag, "pricing": product.prices,
        "category": product.category, "query": product.query, "product_category": product.product_category,
        "Attributes": product.attributes, "options": product.options, "option_to_image": product.option_images,
        "MainImage": product.main_image,
    }  # fmt: skip
    if human and product.human_instructions is not None:
        shown["instructions"] = product.human_instructions
    if not human:
        shown["instruction_text"] = product.instruction
        shown["instruction_attributes"] = product.instruction_attributes
    return shown


@pytest.mark.golden("golden_loader.jsonl")
@pytest.mark.parametrize("case", golden("golden_loader.jsonl"), ids=lambda case: f"{case['id']}-{case['case'][:40]}")
def test_loader(case: dict, cache_dir: Path) -> None:
    human = case["human_goals"]
    if "load_error" in case:
        with pytest.raises(RecordError) as caught:
            list(_source(case).products())
        assert caught.value.original == case["load_error"].split(":")[0]
        return
    products = list(_source(case).products())
    assert len(products) == len(case["loaded"])
    for product, expected in zip(products, case["loaded"], strict=True):
        for key, value in _as_original(product, human).items():
            assert value == expected.get(key), key
    if "index_error" in case:
        with pytest.raises(RecordError) as caught:
            Catalogue.build(_source(case), cache_dir, noun_source=golden_table())
        assert caught.value.original == case["index_error"].split(":")[0]
    else:
        assert [index_text(product) for product in products] == case["index_contents"]
        _check_goals(case, Catalogue.build(_source(case), cache_dir, noun_source=golden_table()))


def _check_goals(case: dict, catalogue: Catalogue) -> None:
    seeding = GoalSeeding(before=case["py_random_seed_before"])
    if "goals_error" in case:
        with pytest.raises({"TypeError": TypeError, "KeyError": KeyError}[case["goals_error"].split(":")[0]]):
            build_goals(catalogue, case["human_goals"], seeding=seeding)
        return
    if not case["goals"]:
        with pytest.raises(ValueError, match="no .* goal"):
            build_goals(catalogue, case["human_goals"], seeding=seeding)
        return
    goals = build_goals(catalogue, case["human_goals"], seeding=seeding)
    order = list(range(len(case["goals"])))
    random.Random(SHUFFLE_SEED).shuffle(order)
    for goal, index in zip(goals, order, strict=True):
        expected = case["goals"][index]
        assert math.isclose(goal.weight, expected["weight"], abs_tol=1e-12)
        assert goal.as_dict() | {"weight": 0} == _null_as_empty(expected) | {"weight": 0}
    drawn = {catalogue.asin(row): price for row, price in enumerate(goals.prices.tolist())}
    assert drawn == case["prices"]


def _null_as_empty(goal: dict) -> dict:
    """The catalogue stores a null text as an empty one."""
    return goal | {key: "" for key in ("name", "category", "product_category") if goal[key] is None}


@pytest.mark.golden("golden_goals.json")
@pytest.mark.parametrize("name", VARIANTS)
def test_goal_list(name: str, golden_shop: Callable, golden_catalogue: Catalogue) -> None:
    variant = VARIANTS[name]
    server, rng = golden_shop(name)
    goals = server.goals
    assert len(goals) == variant["n_goals"] == len(variant["permutation"])
    drawn = {golden_catalogue.asin(row): price for row, price in enumerate(goals.prices.tolist())}
    assert drawn == variant["prices"]
    if name in FINAL:
        for goal, expected in zip(goals, FINAL[name], strict=True):
            assert goal.as_dict() | {"weight": 0} == expected | {"weight": 0}
            assert math.isclose(goal.weight, expected["weight"], abs_tol=1e-12)
    caps = variant["preshuffle_price_upper"]
    assert [goal.price_upper for goal in goals] == [caps[index] for index in variant["permutation"]]
    env = WebAgentTextEnv("text", server=server, rng=rng)
    resets = variant["random_resets"]
    for reset in resets:
        if reset["at"] != "constructor":
            env.reset()
        assert [env.session, env.shopper.goal_index] == [reset["session"], reset["goal_index"]]
