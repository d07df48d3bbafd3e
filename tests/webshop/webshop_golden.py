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


def golden_table() -> TableNouns:
    """The nouns of every golden title, as the original's tagger found them."""
    table = {title: entry["nouns_3.8.0"] for title, entry in golden("golden_nouns.json").items()}
    return TableNouns(table, LexiconNouns())
