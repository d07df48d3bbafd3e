"""Shops built from the catalogue that the golden data were recorded on, and the count of golden cases by file.

    python -m pytest tests/webshop -m golden

ends with how many recorded cases of each file gave the original's answer.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from webshop_golden import golden, golden_count, golden_table

from agent_system.environments.env_package.webshop.catalogue import Catalogue
from agent_system.environments.env_package.webshop.goals import GoalSeeding, GoalSet, build_goals
from agent_system.environments.env_package.webshop.options import ShopOptions
from agent_system.environments.env_package.webshop.shop import ShopServer
from agent_system.environments.env_package.webshop.sources import GivenProducts

_PASSED: Counter[str] = Counter()
_RUN: Counter[str] = Counter()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Note on each golden test which file it replays, and how many of its cases."""
    for item in items:
        for marker in item.iter_markers("golden"):
            file = marker.args[0]
            count = golden_count(file) if marker.kwargs.get("whole") else 1
            item.user_properties.append(("golden", (file, count)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, value in report.user_properties:
        if name == "golden" and report.when == "call":
            file, count = value
            _RUN[file] += count
            _PASSED[file] += count * report.passed


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("markexpr") != "golden":
        return
    terminalreporter.section("recorded cases that give the original's answer")
    for file in sorted(_RUN):
        terminalreporter.write_line(f"{file:<26}{_PASSED[file]:>6,} of {golden_count(file):,}")


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("webshop-cache")


@pytest.fixture(scope="session")
def golden_catalogue(cache_dir: Path) -> Catalogue:
    source = GivenProducts(
        golden("catalogue.json"), golden("attributes.json"), golden("human_ins.json"), strict=True, human_goals=True
    )
    return Catalogue.build(source, cache_dir, noun_source=golden_table())


@pytest.fixture(scope="session")
def golden_shop(golden_catalogue: Catalogue) -> Callable[..., tuple[ShopServer, random.Random]]:
    """``golden_shop(variant)``: the shop of a goal list variant, and its generator as the original's would stand."""

    built: dict[str, tuple[GoalSet, Any]] = {}

    def make(variant: str, **options: Any) -> tuple[ShopServer, random.Random]:
        entry = golden("golden_goals.json")["variants"][variant]
        rng = random.Random()
        kwargs = entry["constructor_kwargs"]
        if entry["impl"] == "va":
            seeding = GoalSeeding.verl_agent(kwargs["seed"])
        else:
            seeding = GoalSeeding(before=entry["py_random_seed_before_constructor"])
        if variant not in built:
            goals = build_goals(
                golden_catalogue, entry["human_goals"], seeding=seeding, rng=rng, limit=kwargs.get("limit_goals")
            )
            built[variant] = goals, rng.getstate()
        goals, state = copy.copy(built[variant][0]), built[variant][1]
        goals._texts = {}
        rng.setstate(state)
        shop_options = ShopOptions(human_goals=entry["human_goals"], original_quirks=True, **options)
        return ShopServer(golden_catalogue, goals, shop_options), rng

    return make
