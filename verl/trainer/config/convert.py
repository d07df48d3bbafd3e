"""From a composed DictConfig to the typed, frozen dataclasses of ``schema``.

Every leaf is checked against its type. A key that is not in the schema is refused with the nearest real one named,
unless ``added_keys`` says that it was added on purpose; then it goes to the ``extra`` mapping of its node.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, Union

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.trainer.config.errors import ConfigError, nearest, unknown_key_message
from verl.trainer.config.schema import ConfigNode, PPOTrainerConfig

NodeT = TypeVar("NodeT", bound=ConfigNode)

_TYPE_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def to_dataclass(config: DictConfig | Mapping[str, Any]) -> PPOTrainerConfig:
    """The typed configuration.

    Args:
        config: the composed configuration; interpolations are resolved here.

    Raises:
        ConfigError: for a value of the wrong type, a missing key, a key that does not exist or an interpolation that
            cannot be resolved.
    """
    return root_from_config(PPOTrainerConfig, config)


def root_from_config(node_type: type[NodeT], config: DictConfig | Mapping[str, Any]) -> NodeT:
    """As :func:`to_dataclass`, for the root of any schema."""
    try:
        plain = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else dict(config)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'configuration'}: {str(error).splitlines()[0]}") from error
    assert isinstance(plain, dict)
    added = plain.get("added_keys") or []
    if not isinstance(added, list):
        raise ConfigError(f"added_keys expects a list (text each), got {_show(added)}")
    return node_from_dict(node_type, plain, added_keys=[str(key) for key in added])


def node_from_dict(
    node_type: type[NodeT], values: Mapping[str, Any], path: str = "", added_keys: list[str] | None = None
) -> NodeT:
    """One node of the schema, such as ``ActorConfig``, from plain values.

    Args:
        node_type: the dataclass of the node.
        values: its keys; every field of the dataclass has to be there.
        path: dotted name of the node, for messages.
        added_keys: dotted names of keys that may be there although the schema does not have them.

    Raises:
        ConfigError: as :func:`to_dataclass`.
    """
    added = added_keys or []
    hints = field_types(node_type)
    extra: dict[str, Any] = {}
    for key in values:
        name = _join(path, str(key))
        if key in hints:
            continue
        if not any(name == one or name.startswith(one + ".") or one.startswith(name + ".") for one in added):
            raise ConfigError(unknown_key_message(name, known_keys()))
        extra[str(key)] = values[key]
    missing = [key for key in hints if key not in values]
    if missing:
        raise ConfigError(f"The setting {_join(path, missing[0])} is missing; every key of ppo_trainer.yaml is needed.")
    converted = {key: _convert(values[key], hint, _join(path, key), added) for key, hint in hints.items()}
    return node_type(**converted, extra=extra)


@functools.cache
def field_types(node_type: type[ConfigNode]) -> dict[str, Any]:
    """Types of a node's own keys, in order."""
    hints = typing.get_type_hints(node_type)
    return {f.name: hints[f.name] for f in fields(node_type) if f.name != "extra"}


@functools.cache
def known_keys() -> tuple[str, ...]:
    """Dotted names of all keys of the schema, nodes included."""
    return tuple(_walk(PPOTrainerConfig, ""))


def takes_null(key: str) -> bool:
    """Whether null is a value of the dotted key; False for a group of settings and for a key that the schema lacks."""
    hint: Any = PPOTrainerConfig
    for part in key.split("."):
        hint = field_types(hint).get(part) if is_dataclass(hint) and isinstance(hint, type) else None
    return hint is not None and type(None) in typing.get_args(hint)


def _walk(node_type: type[ConfigNode], path: str) -> Iterator[str]:
    for key, hint in field_types(node_type).items():
        name = _join(path, key)
        yield name
        if is_dataclass(hint):
            yield from _walk(hint, name)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _convert(value: Any, hint: Any, name: str, added: list[str]) -> Any:
    """``value`` as the type ``hint``; raises ConfigError where it is none."""
    if isinstance(hint, type) and is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{name} is a group of settings, got {_show(value)}; set its keys, such as "
                f"{name}.{next(iter(field_types(hint)))}=..."
            )
        return node_from_dict(hint, value, name, added)
    try:
        return _convert_leaf(value, hint)
    except TypeError:
        raise ConfigError(f"{name} expects {describe(hint)}, got {_show(value)}{_suggest(value, hint)}") from None


def _convert_leaf(value: Any, hint: Any) -> Any:
    """A leaf as the type ``hint``; TypeError where it does not fit."""
    origin = typing.get_origin(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(value, typing.get_args(hint))
    if origin is Literal:
        if value in typing.get_args(hint):
            return value
    elif origin is list:
        if isinstance(value, (list, tuple)):
            (item,) = typing.get_args(hint)
            return [_convert_leaf(one, item) for one in value]
    elif origin is not None and issubclass(origin, Mapping):
        if isinstance(value, Mapping):
            return dict(value)
    elif hint is type(None):
        if value is None:
            return None
    elif hint is bool:
        if isinstance(value, bool):
            return value
    elif hint is int:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and float(value).is_integer():
            return int(value)
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value:  # NaN is no setting
            return float(value)
    elif hint is str:
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            return str(value)
    else:
        raise AssertionError(f"the schema uses a type that is not handled: {hint}")
    raise TypeError


def _convert_union(value: Any, members: tuple[Any, ...]) -> Any:
    for member in members:
        try:
            return _convert_leaf(value, member)
        except TypeError:
            continue
    raise TypeError


def describe(hint: Any) -> str:
    """A type in words: ``a whole number or null``."""
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(member) for member in typing.get_args(hint))
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in typing.get_args(hint))
    if origin is list:
        return f"a list ({describe(typing.get_args(hint)[0])} each)"
    if origin is not None:
        return "a mapping"
    return _TYPE_WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def _show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def _suggest(value: Any, hint: Any) -> str:
    """`` (did you mean X?)`` for a misspelt choice, ``, such as [X]`` for one item where a list of such is expected."""
    for member in (hint, *typing.get_args(hint)):
        if typing.get_origin(member) is list and value is not None and not isinstance(value, (list, Mapping)):
            (item,) = typing.get_args(member)
            try:
                return f", such as [{_convert_leaf(value, item)}]"
            except TypeError:
                return ""
    if typing.get_origin(hint) is not Literal:
        return ""
    meant = nearest(str(value), [str(choice) for choice in typing.get_args(hint)])
    return f" (did you mean {meant}?)" if meant else ""
