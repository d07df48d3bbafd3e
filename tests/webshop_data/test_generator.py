"""The generated shop: official schema, determinism, near-twins, and words that stay apart under fuzzy matching."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from difflib import SequenceMatcher
from itertools import islice, permutations
from pathlib import Path

import pytest

from agent_system.environments.env_package.webshop import generator
from agent_system.environments.env_package.webshop.colours import normalise_colour
from agent_system.environments.env_package.webshop.generator_vocabulary import CATEGORIES, KINDS, OPTION_POOLS

PRODUCT_KEYS = {
    "name", "product_information", "brand", "brand_url", "full_description", "pricing", "list_price",
    "availability_quantity", "availability_status", "images", "product_category", "average_rating",
    "small_description", "total_reviews", "total_answered_questions", "model", "customization_options", "seller_id",
    "seller_name", "fulfilled_by_amazon", "fast_track_message", "aplus_present", "asin", "category", "query", "page",
    "small_description_old",
}  # fmt: skip


def token_set_ratio(left: str, right: str) -> int:
    """The shop's fuzzy comparison, written out from its definition."""
    sets = [set(re.sub(r"\W", " ", text).lower().split()) for text in (left, right)]
    common = " ".join(sorted(sets[0] & sets[1]))
    a, b = (f"{common} {' '.join(sorted(mine - other))}".strip() for mine, other in (sets, sets[::-1]))

    def ratio(one: str, two: str) -> int:
        if not one or not two:
            return 0
        return 100 if one == two else round(100 * SequenceMatcher(None, one, two).ratio())

    return max(ratio(common, a), ratio(common, b), ratio(a, b))


@pytest.fixture(scope="module")
def products() -> list[generator.GeneratedProduct]:
    return list(generator.iter_generated(1000, seed=3))


def test_same_seed_same_shop_and_a_small_shop_starts_a_large_one() -> None:
    assert generator.generate_products(50, 7) == generator.generate_products(400, 7)[:50]
    assert generator.generate_products(50, 7) != generator.generate_products(50, 8)
    assert list(islice(generator.iter_products(10**6, 7), 5)) == generator.generate_products(5, 7)


def test_product_records_have_the_official_schema() -> None:
    for record in generator.generate_products(200, 1):
        assert set(record) == PRODUCT_KEYS
        assert re.fullmatch(r"B0[A-Z0-9]{8}", record["asin"])
        assert re.fullmatch(r"\$\d+\.\d\d( to \$\d+\.\d\d)?", record["pricing"])
        assert 1 <= len(record["small_description"]) <= 4
        assert record["full_description"].count(".") in (1, 2)
        assert record["product_category"].count("›") == 2
        for values in record["customization_options"].values():
            assert [value["is_selected"] for value in values] == [True] + [False] * (len(values) - 1)
            assert len({value["value"] for value in values}) == len(values)


def test_attribute_and_human_files_agree_with_the_products() -> None:
    records = {record["asin"]: record for record in generator.generate_products(300, 2)}
    attributes = generator.generate_attributes(300, 2)
    humans = generator.generate_human_instructions(300, 2)
    assert list(attributes) == list(records) and set(humans) <= set(records)
    for asin, entry in attributes.items():
        assert set(entry) == {"attributes", "instruction", "instruction_attributes"}
        assert 1 <= len(entry["instruction_attributes"]) <= 3
        assert set(entry["instruction_attributes"]) <= set(entry["attributes"])
        assert all(text in entry["instruction"] for text in entry["instruction_attributes"])
        assert records[asin]["query"] in entry["instruction"] and not entry["instruction"].endswith(".")
    for asin, entries in humans.items():
        offered = records[asin]["customization_options"]
        for entry in entries:
            assert entry["asin"] == asin
            assert entry["attributes"] == attributes[asin]["attributes"]
            for text, value in zip(entry["options"], entry["instruction_options"], strict=True):
                group = text.removesuffix(f": {value}")
                assert value in [record["value"] for record in offered[group]] and value in entry["instruction"]


def test_sizes_that_a_small_model_and_the_goal_list_need(products: list[generator.GeneratedProduct]) -> None:
    goals = sum(math.prod(len(values) for values in product.options.values()) for product in products)
    assert 4000 <= goals <= 8000
    assert sum(len(product.human) for product in products) >= 1000
    lengths = sorted(len(product.title.split()) for product in products)
    assert lengths[50] >= 6 and lengths[-50] <= 10
    named = [all(text in p.title.lower() for text in p.instruction_attributes) for p in products]
    assert 0.85 <= sum(named) / len(named) <= 0.95
    texts = " ".join(f"{p.title} {p.description} {' '.join(p.bullets)} {p.instruction}" for p in products)
    assert len(set(re.findall(r"[a-z]+", texts.lower()))) < 2000
    assert len({product.kind.category.name for product in products}) >= 20
    assert len({product.asin for product in products}) == len(products)


def test_every_bullet_or_title_names_each_attribute(products: list[generator.GeneratedProduct]) -> None:
    for product in products:
        text = " ".join([product.title, *product.bullets]).lower()
        assert all(attribute.text in text for attribute in product.attributes)


def test_no_text_claims_an_attribute_the_product_lacks(products: list[generator.GeneratedProduct]) -> None:
    for product in products:
        text = " ".join([product.title, product.description, *product.bullets]).lower()
        owned = {attribute.text for attribute in product.attributes}
        claimed = {attribute.text for attribute in product.kind.category.attributes if attribute.text in text}
        assert claimed == owned


def test_families_hold_near_twins(products: list[generator.GeneratedProduct]) -> None:
    families = defaultdict(list)
    for product in products:
        families[product.index // generator.FAMILY_SIZE].append(product)
    for members in families.values():
        assert len({member.kind for member in members}) == 1
        sets = [frozenset(attribute.text for attribute in member.attributes) for member in members]
        base, count = Counter(sets).most_common(1)[0]
        assert count == 3, "three members share all attributes"
        (other,) = [item for item in sets if item != base]
        assert len(base ^ other) == 2, "one attribute is replaced by another"
        bounds = [member.prices[0] for member in members]
        assert max(bounds) >= 1.15 * sorted(bounds)[-2], "one twin is dearer"


def test_options_move_the_price_inside_its_bounds() -> None:
    seen = 0
    for record in generator.generate_products(400, 5):
        bounds = [float(text) for text in re.findall(r"\$([\d.]+)", record["pricing"])]
        if len(bounds) == 2:
            seen += 1
            group = list(record["customization_options"].values())[-1]
            prices = [float(value["price_string"].removeprefix("$")) for value in group]
            assert prices[0] == bounds[0] and prices == sorted(prices) and prices[-1] <= bounds[1]
    assert seen > 20


@pytest.mark.parametrize("category", CATEGORIES, ids=lambda category: category.name)
def test_words_of_a_category_do_not_match_each_other(category: object) -> None:
    texts = [attribute.text for attribute in category.attributes]
    assert len(texts) >= 11
    for one, two in permutations(texts, 2):
        assert token_set_ratio(one, two) <= 85 and one not in two
    for group, pool in category.option_groups:
        for one, two in permutations(OPTION_POOLS[pool], 2):
            assert token_set_ratio(one, two) <= 85
            assert token_set_ratio(str((group, one)), str((group, two))) <= 85
    assert not [text for text in texts for kind in KINDS if kind.category is category and text in kind.name]


def test_option_values_are_whole_colours_or_none() -> None:
    for category in CATEGORIES:
        for group, pool in category.option_groups:
            for value in OPTION_POOLS[pool]:
                assert normalise_colour(value) == value
                assert normalise_colour((group, value)) in (value, (group, value))


def test_attributes_are_shared_between_categories() -> None:
    counts = Counter(attribute.text for category in CATEGORIES for attribute in category.attributes)
    assert sum(count > 1 for count in counts.values()) >= 30


def test_written_files_are_the_official_ones(tmp_path: Path) -> None:
    products, attributes, human = generator.write_dataset(tmp_path, 120, 4)
    assert [path.name for path in (products, attributes, human)] == list(generator.SMALL_FILES)
    assert json.loads(products.read_text("utf-8")) == generator.generate_products(120, 4)
    assert json.loads(attributes.read_text("utf-8")) == generator.generate_attributes(120, 4)
    assert json.loads(human.read_text("utf-8")) == generator.generate_human_instructions(120, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(generator.SMALL_FILES)


def test_sizes_out_of_range_name_the_key() -> None:
    with pytest.raises(ValueError, match="env.webshop.num_products"):
        generator.generate_products(-1, 0)
    assert generator.generate_products(0, 0) == []


def test_ids_stay_unique_in_a_large_shop() -> None:
    sequence = generator._AsinSequence(11)
    assert len({sequence.asin(index) for index in range(300_000)}) == 300_000
