"""The base of all configuration nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ConfigNode:
    """One node of the configuration tree; its fields are the node's keys, in the order of ``ppo_trainer.yaml``.

    Fields have no defaults: the defaults stand in ``ppo_trainer.yaml`` and nowhere else.

    Attributes:
        extra: keys that were added with a plus (``+algorithm.my_key=3`` is ``cfg.algorithm.extra["my_key"]``).
    """

    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The node as plain dicts, lists and scalars, added keys in their places."""
        plain = {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name != "extra"}
        plain.update({key: _plain(value) for key, value in self.extra.items()})
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, ConfigNode):
        return value.to_dict()
    assert not is_dataclass(value), f"{type(value).__name__} is not a ConfigNode"
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
