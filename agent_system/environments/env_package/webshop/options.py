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
        for key in ("cache_dir", "data_dir", "noun_source"):
            value = getattr(self, key)
            if isinstance(value, os.PathLike):
                object.__setattr__(self, key, os.fspath(value))
            elif not (isinstance(value, str) and value or value is None and key == "data_dir"):
                what = "be lexicon, spacy or a path" if key == "noun_source" else "name a folder"
                raise ValueError(f"{PREFIX}.{key} must {what}, got {value!r}")
        for key, low in (("num_products", 1), ("validation_goals", 0), ("seed", None)):
            value = getattr(self, key)
            unset = value is None and key == "num_products"
            if not unset and (not _is_integer(value) or low is not None and value < low):
                limit = "" if low is None else f" of at least {low}"
                raise ValueError(f"{PREFIX}.{key} must be an integer{limit}, got {value!r}")
        check_limit_goals(self.limit_goals)
        for key in ("use_small", "human_goals", "show_attrs", "compat_seeding", "original_quirks"):
            if not isinstance(getattr(self, key), bool):
                raise ValueError(f"{PREFIX}.{key} must be true or false, got {getattr(self, key)!r}")
        timeout = self.build_timeout
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
            raise ValueError(f"{PREFIX}.build_timeout must be a positive number of seconds, got {timeout!r}")

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


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_limit_goals(limit: Any) -> None:
    """Raise ValueError unless ``limit`` is None, -1 (both: all goals) or a number of goals."""
    if limit is not None and (not _is_integer(limit) or limit < 1 and limit != -1):
        raise ValueError(f"{PREFIX}.limit_goals must be null, -1 or an integer of at least 1, got {limit!r}")
