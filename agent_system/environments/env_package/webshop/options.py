"""Settings of the shop, read from the ``env.webshop`` part of the config or given in code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

PREFIX = "env.webshop"


@dataclass(frozen=True)
class ShopOptions:
    """What a shop is built from and how it behaves. Field names are the keys of ``env.webshop``.

    use_small: with ``data_dir``, read the official 1,000-product files instead of the full ones.
    human_goals: instructions written by people instead of synthetic ones.
    data_dir: folder with the official files; None builds the embedded catalogue.
    num_products: records to read; None reads all (embedded: 1,000).
    seed: seed of the embedded catalogue. The order of goals does not depend on it.
    cache_dir: where built catalogues are kept.
    show_attrs: offer the attributes page of a product.
    validation_goals: number of goals at the start of the list that are kept for validation.
    limit_goals: keep that many goals, drawn by weight; None or -1 keeps all.
    compat_seeding: build the goal list per worker seed as verl-agent does. Its split leaks.
    original_quirks: follow the original where we otherwise prefer a well-defined answer: records, searches and clicks
        that crash it raise here too, negative goal numbers count from the end, numpy integers draw a random goal.
    noun_source: ``auto``, ``spacy``, ``lexicon``, or the path of a JSON file ``{title: [noun, ...]}``.
    build_timeout: seconds to wait for another process that is building the catalogue.
    """

    use_small: bool = True
    human_goals: bool = False
    data_dir: str | None = None
    num_products: int | None = None
    seed: int = 0
    cache_dir: str = "~/.cache/verl-agent/webshop"
    show_attrs: bool = False
    validation_goals: int = 500
    limit_goals: int | None = None
    compat_seeding: bool = False
    original_quirks: bool = False
    noun_source: str = "auto"
    build_timeout: float = 7200.0

    def __post_init__(self) -> None:
        if not isinstance(self.cache_dir, str) or not self.cache_dir:
            raise ValueError(f"{PREFIX}.cache_dir must name a folder, got {self.cache_dir!r}")
        for key, low in (("num_products", 1), ("validation_goals", 0)):
            value = getattr(self, key)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
                raise ValueError(f"{PREFIX}.{key} must be an integer of at least {low}, got {value!r}")

    @classmethod
    def from_config(cls, config: Any = None, **overrides: Any) -> ShopOptions:
        """Options from a mapping, a dataclass or any object with these names; missing names keep the defaults."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            missing = object()
            if config is None:
                found: Any = missing
            elif isinstance(config, Mapping):
                found = config.get(field.name, missing)
            else:
                found = getattr(config, field.name, missing)
            if found is not missing:
                values[field.name] = found
        values.update(overrides)
        return cls(**values)

    @property
    def cache_path(self) -> str:
        return os.path.abspath(os.path.expanduser(os.path.expandvars(self.cache_dir)))
