"""Golden data recorded from the original WebShop."""

from __future__ import annotations

import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

from agent_system.environments.env_package.webshop.nouns import LexiconNouns, TableNouns

DATA = Path(__file__).parent.parent / "data" / "webshop"


@cache
def golden(name: str) -> Any:
    """A golden file: the value of a JSON file, the list of records of a JSON Lines file."""
    path = DATA / name
    text = path.read_text("utf-8") if path.exists() else lzma.open(DATA / f"{name}.xz", "rt", encoding="utf-8").read()
    return [json.loads(line) for line in text.split("\n") if line] if name.endswith(".jsonl") else json.loads(text)


def golden_count(name: str) -> int:
    """Number of recorded cases in a golden file; cases without an answer to compare with are not counted."""
    data = golden(name)
    if name == "golden_goals.json":
        return len(data["variants"])
    if name == "golden_normalize.json":
        return len(data["strings"]) + len(data["tuples"])
    if name == "golden_stems.json":
        return sum(stem is not None for stem in data.values())
    if name == "golden_analysis.jsonl":
        return sum(case.get("tokens") is not None for case in data)
    return len(data)


def golden_table() -> TableNouns:
    """The nouns of every golden title, as the original's tagger found them."""
    table = {title: entry["nouns_3.8.0"] for title, entry in golden("golden_nouns.json").items()}
    return TableNouns(table, LexiconNouns())
