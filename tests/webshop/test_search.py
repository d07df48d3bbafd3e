"""Search against a second method: BM25 computed for every document, term by term."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_system.environments.env_package.webshop import search
from agent_system.environments.env_package.webshop.analysis import analyse
from agent_system.environments.env_package.webshop.index_build import IndexBuilder
from agent_system.environments.env_package.webshop.search import (
    SearchIndex,
    TooManyTermsError,
    decode_length,
    encode_length,
)


def _index(folder: Path, texts: list[str], asins: list[str], chunk: int | None = None) -> SearchIndex:
    folder.mkdir()
    builder = IndexBuilder(folder)
    for text in texts:
        builder.add(text)
        if chunk and len(builder._terms) >= chunk:
            builder._spill_chunk()
    return SearchIndex(folder, builder.finish(asins)["documents"])


def _by_hand(texts: list[str], asins: list[str], query: str) -> tuple[list[int], list[float]]:
    """All documents scored with the formula of the module, in float32 where Lucene is."""
    f = np.float32
    bags = [Counter(analyse(text)) for text in texts]
    lengths = [sum(bag.values()) for bag in bags]
    documents = sum(length > 0 for length in lengths)
    average = f(sum(lengths) / max(documents, 1))
    sums: dict[int, float] = {}
    for term, count in Counter(analyse(query)).items():
        holders = [row for row, bag in enumerate(bags) if term in bag]
        n = len(holders)
        weight = f(count) * f(np.log(1 + (documents - n + 0.5) / (n + 0.5)))
        for row in holders:
            length = f(int(decode_length(encode_length(np.array([lengths[row]])))[0]))
            inverse = f(1) / (f(0.9) * ((f(1) - f(0.4)) + f(0.4) * length / average))
            score = weight - weight / (f(1) + f(bags[row][term]) * inverse)
            sums[row] = sums.get(row, 0.0) + float(score)
    ranked = sorted(((-float(f(total)), asins[row], row) for row, total in sums.items()))[:50]
    return [row for _, _, row in ranked], [-score for score, _, _ in ranked]


def _check(index: SearchIndex, texts: list[str], asins: list[str], query: str) -> None:
    rows, scores = index.search(query)
    expected_rows, expected_scores = _by_hand(texts, asins, query)
    assert rows.tolist() == expected_rows, query
    np.testing.assert_array_equal(scores, np.array(expected_scores, dtype=np.float32))
    assert not index._sums.any(), "the search buffer is left clean"


@pytest.mark.parametrize("seed", range(4))
def test_pruned_search_equals_full_scoring(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zipf-distributed words, many equal documents (ties at the 50th place), long and short queries."""
    rng = random.Random(seed)
    if seed % 2:  # what large indexes do
        monkeypatch.setattr(search, "_WORTH_A_SAMPLE", 0)
        monkeypatch.setattr(search, "_SAMPLE", 60)
    words = [f"w{i}x" for i in range(60)]
    weights = [1 / (i + 1) ** rng.choice([0.5, 1.0, 1.6]) for i in range(60)]
    texts = [" ".join(rng.choices(words, weights, k=rng.choice([0, 1, 3, 12, 40]))) for _ in range(700)]
    texts += rng.choices(texts, k=300)
    asins = [f"B{number:05d}" for number in rng.sample(range(100_000), len(texts))]
    index = _index(tmp_path / "index", texts, asins, chunk=rng.choice([None, 37, 1000]))
    for _ in range(40):
        query = " ".join(rng.choices(words + ["absent"], k=rng.choice([1, 2, 3, 8, 20, 70])))
        _check(index, texts, asins, query)


def test_no_documents(tmp_path: Path) -> None:
    for number, texts in enumerate([[], ["", "the of"]]):
        index = _index(tmp_path / str(number), texts, [str(i) for i in range(len(texts))])
        rows, scores = index.search("shoes")
        assert len(rows) == len(scores) == 0


def test_length_code() -> None:
    lengths = np.arange(200_000)
    codes = encode_length(lengths)
    decoded = decode_length(codes)
    assert (np.diff(codes.astype(int)) >= 0).all()
    np.testing.assert_array_equal(decoded[:40], lengths[:40])
    assert (decoded <= lengths).all() and (decoded >= lengths * 0.87).all()
    np.testing.assert_array_equal(encode_length(decoded), codes)


@pytest.mark.parametrize(
    "query",
    [
        "a" * 100_000, "search " * 15_000, "x[" * 50_000, "' OR 1=1; DROP TABLE products; --", "{{ 7*7 }} {% raw %} ${x}",
        "._'" * 30_000, "\u200d\u0301" * 40_000, "🛒" * 30_000, "é_." * 30_000, "1,2.3;4" * 15_000, "word" + "'s" * 50_000,
        "日本" * 40_000, "가나" * 40_000, "ก" * 90_000, "אב\"" * 30_000, "_" * 100_000, "_é" * 50_000, "\x00\ud800 shoes",
        "a\u00ad" * 40_000, "ア_" * 40_000, "\U0001f1e9" * 40_000, "https://a.b/c?d=e&f[]=g " * 4000,
    ],
    ids=lambda query: repr(query[:12]),
)  # fmt: skip
def test_any_text_is_just_text(query: str, tmp_path: Path) -> None:
    index = _index(tmp_path / "index", ["red shoes", "blue table"], ["A", "B"])
    start = time.process_time()  # of this process alone, whatever else the machine does
    rows, _ = index.search(query)
    assert time.process_time() - start < 5
    assert set(rows.tolist()) <= {0, 1}


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60))
def test_analysis_never_fails(text: str) -> None:
    for term in analyse(text):
        assert term and len(term) <= 255


def test_more_terms_than_the_original_takes(tmp_path: Path) -> None:
    index = _index(tmp_path / "index", ["w3 shoes", "w2000 shoes"], ["A", "B"])
    query = " ".join(f"w{i}" for i in range(3000))
    rows, _ = index.search(query)
    assert rows.tolist() == [0], "the first 1,024 terms count"
    with pytest.raises(TooManyTermsError):
        index.search(query, strict=True)


@pytest.mark.parametrize("method", ["_add_all", "_complete"])
def test_a_search_that_was_cut_short_leaves_the_next_ones_right(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time limit may strike anywhere in a search; sums that it left behind must not count for other sessions."""
    texts = [f"tea {'green ' * (i % 3)} cup {i}" for i in range(120)]
    index = _index(tmp_path / "i", texts, [f"B{i:09d}" for i in range(120)])
    expected = [index.search(query) for query in ("green tea", "cup 7 tea")]
    whole = getattr(index, method)

    def cut(*arguments: object) -> None:
        whole(*arguments)
        index._sums[:50] += 1.0
        raise TimeoutError("took longer than 1 s")

    with monkeypatch.context() as patch:
        patch.setattr(index, method, cut)
        with pytest.raises(TimeoutError):
            index.search("tea")
    for (rows, scores), query in zip(expected, ("green tea", "cup 7 tea"), strict=True):
        found = index.search(query)
        np.testing.assert_array_equal(found[0], rows)
        np.testing.assert_array_equal(found[1], scores)
