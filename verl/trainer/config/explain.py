"""``explain=true``: every value with its source, and the numbers that follow from them."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl.trainer.config.compose import Composition
from verl.trainer.config.convert import to_dataclass
from verl.trainer.config.derived import derived_lines
from verl.trainer.config.machine import resolve_device
from verl.trainer.config.notices import notices

_VALUE_WIDTH = 34


def explain(composition: Composition) -> str:
    """The text that ``explain=true`` prints."""
    config = resolve_device(to_dataclass(composition.config))
    rows = list(sources(composition))
    width = max(len(name) for name, _, _ in rows)
    lines = [f"{name:<{width}}  {value:<{_VALUE_WIDTH}}  {source}" for name, value, source in rows]
    lines += ["", "What follows from it:"]
    lines += [f"  {name:<44} {value}" for name, value in derived_lines(config)]
    remarks = notices(config)
    if remarks:
        lines += ["", "To note:", *(f"  {remark}" for remark in remarks)]
    return "\n".join(line.rstrip() for line in lines)


def sources(composition: Composition) -> Iterator[tuple[str, str, str]]:
    """``(key, value, source)`` of every leaf; the source is a file, the preset, the command line or another key."""
    resolved = OmegaConf.create(OmegaConf.to_container(composition.config, resolve=True))
    assert isinstance(resolved, DictConfig)
    for name in _leaf_names(composition.config):
        if name in ("added_keys", "explain"):
            continue
        yield name, _show(OmegaConf.select(resolved, name)), _source(composition, name)


def _source(composition: Composition, name: str) -> str:
    if _among(name, composition.typed_keys):
        source = "command line"
    elif _among(name, composition.preset_keys):
        source = f"preset {composition.config.preset}"
    else:
        source = composition.source_file
    parent, _, leaf = name.rpartition(".")
    node = OmegaConf.select(composition.config, parent) if parent else composition.config
    if isinstance(node, DictConfig) and OmegaConf.is_interpolation(node, leaf):
        raw = OmegaConf.to_container(node, resolve=False)
        assert isinstance(raw, dict)
        source += f", {raw[leaf]}"
    return source


def _among(name: str, keys: frozenset[str]) -> bool:
    return name in keys or any(name.startswith(key + ".") for key in keys if key)


def _leaf_names(node: DictConfig, path: str = "") -> Iterator[str]:
    for key in node:
        name = f"{path}.{key}" if path else str(key)
        child = None if OmegaConf.is_interpolation(node, str(key)) else node[key]
        if isinstance(child, DictConfig) and len(child):
            yield from _leaf_names(child, name)
        else:
            yield name


def _show(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
