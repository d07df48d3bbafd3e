"""Keys of a resolved configuration that follow others, as they do in the YAML of this package.

A resolved configuration holds values alone: ``trainer.default_local_dir`` no longer says that it is made of the names
of project and experiment. Where such a value is still what the key would follow to, it follows again, so that a run
that is repeated under another name gets another folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


def followers(resolved: DictConfig, original: DictConfig) -> dict[str, str]:
    """Interpolations of ``original`` that give what ``resolved`` has as a value, by dotted key.

    Args:
        resolved: a configuration of values; what is an interpolation there already is left out.
        original: the configuration it was made from, interpolations unresolved.
    """
    found, trial = {}, resolved.copy()
    for key, text in _interpolations(OmegaConf.to_container(original, resolve=False)):
        parent, _, name = key.rpartition(".")
        node = OmegaConf.select(trial, parent)
        if not isinstance(node, DictConfig) or name not in node or OmegaConf.is_interpolation(node, name):
            continue
        value, node[name] = node[name], text
        try:
            if node[name] == value:
                found[key] = text
        except OmegaConfBaseException:  # it follows a key that is not there
            pass
        node[name] = value
    return found


def _interpolations(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys whose value is made of others, and how."""
    for name, value in tree.items():
        key = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping):
            yield from _interpolations(value, key)
        elif isinstance(value, str) and "${" in value:
            yield key, value
