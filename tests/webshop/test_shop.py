"""Opening shops: sources, tolerance, goal order and split, settings."""

from __future__ import annotations

import json
import logging
import multiprocessing
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from webshop_golden import golden

from agent_system.environments.env_package.webshop import catalogue as catalogue_module
from agent_system.environments.env_package.webshop import goal_store as goal_store_module
from agent_system.environments.env_package.webshop.catalogue import Catalogue
from agent_system.environments.env_package.webshop.goal_store import open_goals, split_goals
from agent_system.environments.env_package.webshop.goals import build_goals, draw_cap
from agent_system.environments.env_package.webshop.json_stream import DataFileError
from agent_system.environments.env_package.webshop.nouns import LexiconNouns
from agent_system.environments.env_package.webshop.options import ShopOptions
from agent_system.environments.env_package.webshop.records import LoadReport, read_products
from agent_system.environments.env_package.webshop.session import ShopSession, load_shop
from agent_system.environments.env_package.webshop.sources import FULL_FILES, SMALL_FILES, GivenProducts
from agent_system.environments.env_package.webshop.text_env import WebAgentTextEnv

RECORD = golden("golden_loader.jsonl")[0]["input"]["products"][0]


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """The golden data under the official names of the full set."""
    folder = tmp_path / "official"
    folder.mkdir()
    for name, data in zip(FULL_FILES, ("catalogue.json", "attributes.json", "human_ins.json"), strict=True):
        (folder / name).write_text(json.dumps(golden(data)), encoding="utf-8")
    return folder


def test_official_files(data_dir: Path, tmp_path: Path, golden_shop: Callable) -> None:
    config = SimpleNamespace(data_dir=str(data_dir), use_small=False, human_goals=True, cache_dir=str(tmp_path / "c"))
    shop = load_shop(config)
    recorded, _ = golden_shop("orig_pyseed233_human1")
    assert [goal.as_dict() for goal in shop.goals] == [goal.as_dict() for goal in recorded.goals]
    assert len(shop.catalogue) == 200
    assert "200 products loaded" in shop.catalogue.report
    env = WebAgentTextEnv(
        "text", file_path=data_dir / FULL_FILES[0], human_goals=True, num_products=50, cache_dir=str(tmp_path / "c")
    )
    assert len(env.server.catalogue) < 51
    assert env.reset(session=3)[0].startswith("WebShop [SEP] Instruction: [SEP] ")


def test_missing_files_say_what_to_change(data_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lacks items_shuffle_1000.json.*env.webshop.use_small=false reads it"):
        load_shop(data_dir=str(data_dir), cache_dir=str(tmp_path))
    with pytest.raises(ValueError, match="lacks items_shuffle.json, items_ins_v2.json.*the embedded shop is used"):
        load_shop(data_dir=str(tmp_path / "nowhere"), use_small=False, cache_dir=str(tmp_path))


def test_damaged_file_names_file_and_record(data_dir: Path, tmp_path: Path) -> None:
    path = data_dir / FULL_FILES[0]
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    with pytest.raises(DataFileError, match=r"items_shuffle.json: record \d+: "):
        load_shop(data_dir=str(data_dir), use_small=False, cache_dir=str(tmp_path / "c"))
    path.write_text(text)
    assert len(load_shop(data_dir=str(data_dir), use_small=False, cache_dir=str(tmp_path / "c")).catalogue) == 200


def test_changed_data_make_another_catalogue(data_dir: Path, tmp_path: Path) -> None:
    def key() -> tuple[str, str]:
        shop = load_shop(data_dir=str(data_dir), use_small=False, cache_dir=str(tmp_path / "c"))
        return shop.catalogue.key, shop.split.digest

    first = key()
    assert key() == first
    records = golden("catalogue.json")
    (data_dir / FULL_FILES[0]).write_text(json.dumps(records[1:]))
    second = key()
    assert second[0] != first[0] and second[1] != first[1]
    (data_dir / FULL_FILES[0]).write_text(json.dumps(records))
    assert key() == first


def _record(**changes: object) -> dict:
    return {key: value for key, value in (RECORD | changes).items() if value != "(missing)"}


def _products(**changes: object) -> tuple[list, LoadReport]:
    report = LoadReport()
    return list(read_products([(_record(**changes), None, None)], report=report)), report


@pytest.mark.parametrize("key", [key for key in RECORD if key != "asin"])
@pytest.mark.parametrize(
    "value", ["(missing)", None, 5, 1.5, True, [], {}, "", "text", [None], [[]], {"a": [5]}, {"": None}]
)
def test_tolerant_reading_repairs_any_field(key: str, value: object, cache_dir: Path) -> None:
    (product,), _ = _products(**{key: value})
    assert product.asin == RECORD["asin"]
    assert isinstance(product.title, str) and isinstance(product.description, str) and isinstance(product.query, str)
    assert all(isinstance(bullet, str) for bullet in product.bullets)
    assert product.prices and all(isinstance(price, float) for price in product.prices)
    source = GivenProducts([_record(**{key: value})], {}, {})
    catalogue = Catalogue.build(source, cache_dir, noun_source=LexiconNouns())
    assert catalogue.product(0).title == product.title


@pytest.mark.parametrize(
    "record", [None, 5, "x", [], {}, {"asin": None}, {"asin": 7}, {"asin": "nan"}, {"asin": "B" * 11}]
)
def test_tolerant_reading_skips_what_has_no_id(record: object) -> None:
    report = LoadReport()
    products = list(read_products([(item, None, None) for item in (record, RECORD, RECORD)], report=report))
    assert len(products) == 1
    assert sum(report.skipped.values()) == 2
    assert any("asin seen before" in line for line in report.lines())


def test_tolerant_reading_keeps_the_texts_of_an_instruction(cache_dir: Path) -> None:
    wanted = [None, 5, "soft", {}, ["x"]]
    synthetic = {"attributes": ["soft"], "instruction": "find it", "instruction_attributes": wanted}
    human = [{"instruction": "find it", "instruction_attributes": wanted, "instruction_options": wanted}]
    source = GivenProducts([RECORD], {RECORD["asin"]: synthetic}, {RECORD["asin"]: human})
    catalogue = Catalogue.build(source, cache_dir, noun_source=LexiconNouns())
    assert source.report.repaired["attribute of an instruction dropped"] == 8
    for kind in (False, True):
        goal = build_goals(catalogue, kind)[0]
        assert list(goal.attributes) == ["soft"]
    assert goal.goal_options == ["soft"]


@pytest.mark.parametrize(
    ("pricing", "tag"), [
        (12.5, "$12.5"), (7, "$7.0"), ("12.99", "$100.0"), ("$", "$100.0"), (True, "$100.0"), (-5, "$100.0"),
        (float("nan"), "$100.0"), (float("inf"), "$100.0"), (10**400, "$100.0"),
    ],
)
def test_tolerant_prices(pricing: object, tag: str) -> None:
    (product,), report = _products(pricing=pricing)
    assert product.price_tag == tag
    assert report.repaired["pricing unusable"] == 1


def test_goal_order_is_a_function_of_the_data(tmp_path: Path) -> None:
    """The same list whatever the global seed, the process or the cache folder."""
    code = (
        "import random, sys; random.seed(int(sys.argv[2]));"
        "from agent_system.environments.env_package.webshop.session import load_shop;"
        "shop = load_shop(num_products=120, cache_dir=sys.argv[1]);"
        "print(shop.split.digest, shop.goals[7].instruction_text)"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / str(seed % 2)), str(seed)], capture_output=True, text=True, timeout=120,
            check=True,
        ).stdout
        for seed in range(3)
    }  # fmt: skip
    assert len(answers) == 1


def test_goals_and_split_do_not_depend_on_the_noun_source(golden_catalogue: Catalogue, tmp_path: Path) -> None:
    data = golden("catalogue.json"), golden("attributes.json"), golden("human_ins.json")
    source = GivenProducts(*data, strict=True, human_goals=True)
    tagged = Catalogue.build(source, tmp_path, noun_source=LexiconNouns())
    assert tagged.key != golden_catalogue.key
    for human in (False, True):
        assert build_goals(tagged, human).digest(500) == build_goals(golden_catalogue, human).digest(500)


def test_split(cache_dir: Path) -> None:
    shop = load_shop(cache_dir=str(cache_dir))
    split = shop.split
    assert (split.validation, split.training) == (range(500), range(500, len(shop.goals)))
    assert len(split.training) > 2000, "the embedded shop leaves enough to train on"
    split.check(training_needed=256)
    assert len(split.digest) == 16
    other = load_shop(cache_dir=str(cache_dir), validation_goals=100).split
    assert other.digest != split.digest and other.training == range(100, len(shop.goals))
    with pytest.raises(ValueError, match=f"{len(split.training)} are left where 99999 different training goals"):
        split.check(training_needed=99999)
    small = split_goals(load_shop(cache_dir=str(cache_dir), num_products=40).goals, 500)
    assert 0 < small.total < 500 and len(small.training) == 0
    with pytest.raises(ValueError, match=rf"env.webshop.validation_goals may be at most {small.total - 1}"):
        small.check()


def test_goals_on_disk_equal_goals_in_memory(golden_catalogue: Catalogue, tmp_path: Path) -> None:
    for human in (False, True):
        stored = open_goals(golden_catalogue, human, tmp_path)
        built = build_goals(golden_catalogue, human)
        assert [goal.as_dict() for goal in stored] == [goal.as_dict() for goal in built]
        assert stored.digest(500) == built.digest(500)
        assert [stored.pick(random.Random(i)) for i in range(20)] == [built.pick(random.Random(i)) for i in range(20)]


def test_filter_and_limit(golden_catalogue: Catalogue) -> None:
    everything = build_goals(golden_catalogue, True)
    kept = build_goals(golden_catalogue, True, filter_goals=lambda index, goal: index % 2 and goal["price_upper"] < 100)
    expected = [goal for index, goal in enumerate(everything) if index % 2 and goal.price_upper < 100]
    assert list(kept) == expected
    limited = build_goals(golden_catalogue, True, limit=10)
    assert len(limited) == 10 and len({goal.instruction_text for goal in limited}) == 10
    assert len(build_goals(golden_catalogue, True, limit=-1)) == len(everything)
    with pytest.raises(ValueError, match="no human goal"):
        build_goals(golden_catalogue, True, filter_goals=lambda index, goal: False)


def test_pick_follows_the_weights_shifted_by_one(golden_catalogue: Catalogue) -> None:
    goals = build_goals(golden_catalogue, False, limit=6)
    rng = random.Random(0)
    draws = np.bincount([goals.pick(rng) for _ in range(20_000)], minlength=6) / 20_000
    shifted = np.array([0.0, *goals.weights[:4], goals.weights[4] + goals.weights[5]])
    np.testing.assert_allclose(draws, shifted / shifted.sum(), atol=0.015)


@pytest.mark.parametrize(("price", "candidates"), [(0.0, [20, 30, 40]), (9.99, [20, 30, 40]), (10.0, [30, 40, 50])])
def test_cap_is_never_the_lowest_candidate(price: float, candidates: list[int]) -> None:
    rng = random.Random(0)
    draws = [draw_cap(price, rng) for _ in range(3000)]
    shares = np.bincount(draws)[candidates] / 3000
    np.testing.assert_allclose(shares, [1 / 6, 2 / 6, 3 / 6], atol=0.03)
    assert draw_cap(980.0, rng) == draw_cap(5000.0, rng) == 1000000
    assert draw_cap(975.0, rng) == 990


def test_compat_seeding(
    data_dir: Path, tmp_path: Path, golden_shop: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    """One worker's list is what verl-agent's seed gives; workers share the catalogue; the leak is warned of."""
    with caplog.at_level(logging.WARNING):
        shop = load_shop(
            data_dir=str(data_dir), use_small=False, human_goals=True, compat_seeding=True, cache_dir=str(tmp_path)
        )
    assert "do not measure generalisation" in caplog.text
    for seed in (0, 42, 1000):
        recorded, _ = golden_shop(f"va_seed{seed}_human1")
        worker = shop.for_worker(seed)
        assert [goal.as_dict() for goal in worker.goals] == [goal.as_dict() for goal in recorded.goals]
        assert worker.catalogue is shop.catalogue and shop.for_worker(seed) is worker
    plain = load_shop(data_dir=str(data_dir), use_small=False, human_goals=True, cache_dir=str(tmp_path))
    assert plain.for_worker(3) is plain


def test_settings() -> None:
    options = ShopOptions.from_config({"human_goals": True, "unrelated": 1}, num_products=5)
    assert options.human_goals and options.num_products == 5
    assert ShopOptions.from_config(SimpleNamespace(show_attrs=True)).show_attrs
    for wrong in (0, -3, True, 2.5, "many"):
        with pytest.raises(ValueError, match="env.webshop.num_products"):
            ShopOptions(num_products=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="env.webshop.noun_source"):
        load_shop(noun_source="/no/such/file")
    assert ShopOptions(cache_dir=Path("a"), data_dir=Path("b")).cache_dir == "a"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("noun_source", (None, 5, "", ["lexicon"])),
        ("cache_dir", (None, "", 3)),
        ("data_dir", ("", 3, ["a"])),
        ("seed", (None, "0", 1.5, True)),
        ("validation_goals", (None, -1, "500")),
        ("limit_goals", (0, -2, "5", 2.5, True)),
        ("use_small", (None, "false", 1)),
        ("human_goals", (None, "yes")),
        ("build_timeout", (0, -1, "60", None, float("nan"))),
    ],
)
def test_settings_that_cannot_be_used_are_named(key: str, values: tuple) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"env.webshop.{key} must"):
            load_shop(**{key: value})


def test_noun_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    path = tmp_path / "nouns.json"
    for text in ('{"a title": 5}', '{"a title": ["x", null]}', "[" * 100_000, '{"a": ["\xff"]}', ""):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match="env.webshop.noun_source=.*nouns.json"):
            load_shop(noun_source=str(path))


def test_a_new_version_of_the_code_builds_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of a catalogue covers what reads, analyses and writes it; that of a goal list also what draws goals."""
    first = load_shop(num_products=40, cache_dir=str(tmp_path))
    folders = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    for module in (catalogue_module, goal_store_module):
        monkeypatch.setattr(module, "code_digest", lambda *patterns: "another version")
    second = load_shop(num_products=40, cache_dir=str(tmp_path))
    assert len({path.name for path in tmp_path.iterdir() if path.is_dir()} - folders) == 2
    assert second.catalogue.key != first.catalogue.key
    assert (second.split.digest, second.catalogue.content) == (first.split.digest, first.catalogue.content)


def test_the_code_of_a_catalogue_is_named_in_full() -> None:
    """Every module of the engine that building a catalogue runs is in its key, or in the key of nouns or generator."""
    code = (
        "import sys; from pathlib import Path; import agent_system.environments.env_package.webshop.catalogue as c;"
        "folder = Path(c.__file__).parent;"
        "print(*sorted(Path(m.__file__).name for m in list(sys.modules.values())"
        "  if getattr(m, '__file__', None) and Path(m.__file__).parent == folder))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    apart = {"__init__.py", "gym_faces.py", "options.py", "nouns.py", "noun_tagger.py"}
    named = set(catalogue_module._CODE)
    loaded = {name for name in found.stdout.split() if not name.startswith("generator")}
    assert loaded - apart == named


def test_the_embedded_shop_stays_what_the_shipped_model_has_learnt(cache_dir: Path) -> None:
    """Other products, goals or an other order make the shipped model's figures void: it has to be trained anew then."""
    shop = load_shop(cache_dir=str(cache_dir))
    assert (shop.catalogue.content, shop.split.digest) == ("d4f46b0ddfc8dd8d3e459158cc3f60b9", "a076b605a005a778")


@pytest.mark.parametrize("num_products", [1, 2, 3, 5])
def test_tiny_shops_work_or_say_why_not(num_products: int, cache_dir: Path) -> None:
    for seed in range(4):
        shop = load_shop(num_products=num_products, seed=seed, cache_dir=str(cache_dir))
        session = ShopSession(shop)
        session.reset(0)
        assert session.step(f"search[{session.goal.name}]")[3]["available_actions"]["clickables"][2:]
    with pytest.raises(ValueError, match="env.webshop.num_products must be between"):
        load_shop(num_products=10**10, cache_dir=str(cache_dir))


def test_half_characters_of_the_data_are_replaced(cache_dir: Path) -> None:
    """JSON can spell half a surrogate pair, which no page could be encoded with; whole pairs stay what they mean."""
    record = _record(
        name="half \ud83d cup", small_description=["whole \ud83d\ude42"], category="c\udfff",
        customization_options={"si\ud800ze": [{"value": "x\udc00", "image": 7}]},
    )  # fmt: skip
    source = GivenProducts([record], {}, {})
    product = Catalogue.build(source, cache_dir, noun_source=LexiconNouns()).product(0)
    assert (product.title, product.category) == ("half \ufffd cup", "c\ufffd")
    assert product.bullets == ["whole \U0001f642"]
    assert product.options == {"si\ufffdze": ["x\ufffd"]} and product.option_images == {"x\ufffd": None}


def _play(arguments: tuple[str, int]) -> list[str]:
    cache, seed = arguments
    session = ShopSession(load_shop(num_products=150, cache_dir=cache), rng=random.Random(0))
    pages = [session.reset(seed)]
    for action in (f"search[{session.instruction_text}]", "click[next >]"):
        pages.append(session.step(action)[0])
    return pages


def test_processes_share_one_build(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        answers = pool.map(_play, [(str(tmp_path), 5)] * 3)
    assert answers[0] == answers[1] == answers[2]
    built = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(built) == 2, "one catalogue, one goal list"
    victim = max((f for p in built for f in p.iterdir()), key=lambda f: f.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-100])
    assert _play((str(tmp_path), 5)) == answers[0], "a damaged file is rebuilt"


def test_names_of_the_small_set(tmp_path: Path) -> None:
    assert SMALL_FILES[0] == "items_shuffle_1000.json" and FULL_FILES[2] == SMALL_FILES[2] == "items_human_ins.json"
