"""Text analysis and rankings against recordings of Lucene."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from webshop_golden import golden

from agent_system.environments.env_package.webshop.analysis import analyse
from agent_system.environments.env_package.webshop.catalogue import Catalogue, index_text
from agent_system.environments.env_package.webshop.porter import stem
from agent_system.environments.env_package.webshop.search import TooManyTermsError


@pytest.mark.golden("golden_stems.json", whole=True)
def test_stems() -> None:
    stems = golden("golden_stems.json")
    assert len(stems) > 4000
    wrong = {word: stem(word) for word, expected in stems.items() if expected is not None and stem(word) != expected}
    assert wrong == {}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        pytest.param("golden_analysis.jsonl", "text", marks=pytest.mark.golden("golden_analysis.jsonl", whole=True)),
        ("golden_index_docs.jsonl", "contents"),
        ("golden_search.jsonl", "query"),
    ],
)
def test_tokens(name: str, key: str) -> None:
    cases = [case for case in golden(name) if case.get("tokens") is not None]
    assert len(cases) >= 200
    for case in cases:
        assert analyse(case[key]) == case["tokens"], case[key][:200]


@pytest.mark.golden("golden_index_docs.jsonl", whole=True)
def test_index_text(golden_catalogue: Catalogue) -> None:
    documents = {case["asin"]: case["contents"] for case in golden("golden_index_docs.jsonl")}
    assert len(documents) == len(golden_catalogue) == 200
    for row in range(len(golden_catalogue)):
        product = golden_catalogue.product(row)
        assert index_text(product) == documents[product.asin]


@pytest.mark.golden("golden_search.jsonl")
@pytest.mark.parametrize("case", golden("golden_search.jsonl"), ids=lambda case: f"{case['id']}-{case['kind']}")
def test_ranking(case: dict, golden_catalogue: Catalogue, golden_shop: Callable) -> None:
    server, _ = golden_shop("orig_pyseed233_human0")
    rng = random.Random(case.get("py_random_seed_before"))
    if "error" in case:
        expected = {"IndexError": IndexError, "TypeError": TypeError}.get(
            case["error"].split(":")[0], TooManyTermsError
        )
        with pytest.raises(expected):
            server.search(case["query"], rng)
        return
    rows = server.search(case["query"], rng)
    assert [golden_catalogue.asin(int(row)) for row in rows] == case["asins"]
    if "scores" in case:
        _, scores = golden_catalogue.index.search(case["query"])
        np.testing.assert_allclose(np.round(scores.astype(np.float64), 4), case["scores"], atol=1.1e-4)
