"""From a composed DictConfig to the typed, frozen dataclasses of ``schema``.

Every leaf is checked against its type, and all that do not fit are reported together. A key that is not in the schema
is refused with the nearest real one named, unless ``added_keys`` says that it was added on purpose; then it goes to the
``extra`` mapping of its node.
"""

from __future__ import annotations

import functools
import re
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
    problems: dict[str, str] = {}
    plain = _resolved(config, problems) if isinstance(config, DictConfig) else dict(config)
    added = plain.get("added_keys") or []
    if not isinstance(added, list):
        problems["added_keys"] = f"added_keys expects a list (text each), got {_show(added)}"
        added = []
    node = _node(node_type, plain, "", [str(key) for key in added], problems)
    if node is None or problems:
        raise ConfigError(*_causes(problems, config))
    return node


def _resolved(config: DictConfig, problems: dict[str, str]) -> dict[str, Any]:
    """Plain values. What cannot be resolved is null there and gets a line in ``problems``, by its dotted key."""
    trial = config
    while True:
        try:
            plain = OmegaConf.to_container(trial, resolve=True)
            assert isinstance(plain, dict)
            return plain
        except OmegaConfBaseException as error:
            key, reason = error.full_key, str(error).splitlines()[0]
            if not key or key in problems:
                raise ConfigError(*problems.values(), f"{key or 'configuration'}: {reason}") from error
            problems[key] = f"{key}: {reason}"
            trial = trial.copy()
            OmegaConf.set_readonly(trial, False)
            OmegaConf.set_struct(trial, False)
            OmegaConf.update(trial, key, None)


def _causes(problems: Mapping[str, str], config: DictConfig | Mapping[str, Any]) -> list[str]:
    """The lines of ``problems`` without those of keys that have a value only because they follow another with one."""
    if not isinstance(config, DictConfig):
        return list(problems.values())
    own = [line for key, line in problems.items() if not any(one in problems for one in _followed(config, key))]
    return own or list(problems.values())  # keys may follow each other in a circle


def _followed(config: DictConfig, key: str) -> list[str]:
    """The keys that ``key`` follows (``${data.seed}``)."""
    parent, _, leaf = key.rpartition(".")
    node = OmegaConf.select(config, parent, throw_on_resolution_failure=False) if parent else config
    if not isinstance(node, DictConfig) or leaf not in node.keys() or not OmegaConf.is_interpolation(node, leaf):
        return []
    plain = OmegaConf.to_container(node, resolve=False)
    assert isinstance(plain, dict)
    return re.findall(r"\$\{([\w.]+)\}", str(plain[leaf]))


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
    problems: dict[str, str] = {}
    node = _node(node_type, values, path, added_keys or [], problems)
    if node is None or problems:
        raise ConfigError(*problems.values())
    return node


def _node(
    node_type: type[NodeT], values: Mapping[str, Any], path: str, added: list[str], problems: dict[str, str]
) -> NodeT | None:
    """As :func:`node_from_dict`; what does not fit gets a line in ``problems``, by its dotted key, and counts as null.

    None where a key is missing.
    """
    hints = field_types(node_type)
    extra: dict[str, Any] = {}
    for key in values:
        name = _join(path, str(key))
        if key in hints:
            continue
        if not any(name == one or name.startswith(one + ".") or one.startswith(name + ".") for one in added):
            problems[name] = unknown_key_message(name, known_keys())
        extra[str(key)] = values[key]
    missing = [_join(path, key) for key in hints if key not in values]
    for name in missing:
        problems[name] = f"The setting {name} is missing; every key of ppo_trainer.yaml is needed."
    converted = {
        key: _convert(values[key], hint, _join(path, key), added, problems)
        for key, hint in hints.items()
        if key in values
    }
    return None if missing else node_type(**converted, extra=extra)


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
    return type(None) in typing.get_args(_hint(PPOTrainerConfig, key))


def takes_text(root: type[ConfigNode], key: str) -> bool:
    """Whether a number given for the dotted key is meant as text: text is a value of it, and a number is none."""
    hint = _hint(root, key)
    members = {hint, *typing.get_args(hint)}
    return str in members and not members & {int, float}


def _hint(root: type[ConfigNode], key: str) -> Any:
    """The type of a dotted key; None for a key that the schema lacks."""
    hint: Any = root
    for part in key.split("."):
        hint = field_types(hint).get(part) if is_dataclass(hint) and isinstance(hint, type) else None
    return hint


def _walk(node_type: type[ConfigNode], path: str) -> Iterator[str]:
    for key, hint in field_types(node_type).items():
        name = _join(path, key)
        yield name
        if is_dataclass(hint):
            yield from _walk(hint, name)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _convert(value: Any, hint: Any, name: str, added: list[str], problems: dict[str, str]) -> Any:
    """``value`` as the type ``hint``; None, and a line in ``problems``, where it is none."""
    if isinstance(hint, type) and is_dataclass(hint):
        if isinstance(value, Mapping):
            return _node(hint, value, name, added, problems)
        problems.setdefault(
            name,
            f"{name} is a group of settings, got {_show(value)}; set its keys, such as "
            f"{name}.{next(iter(field_types(hint)))}=...",
        )
        return None
    try:
        return _convert_leaf(value, hint)
    except TypeError:
        problems.setdefault(name, f"{name} expects {describe(hint)}, got {_show(value)}{_suggest(value, hint)}")
        return None


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
    """What to write instead: a choice that was misspelt, a list for one item, quotes for a word that is no text."""
    if str in (hint, *typing.get_args(hint)) and (value is None or isinstance(value, bool)):
        return f"""; as a text it is quoted twice: '"{_show(value)}"'"""
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
