"""Composition of the configuration from YAML, preset and command line.

Hydra does the work; what is added is that every mistake becomes one line that names the fix, and that all mistakes of
names and types are reported together.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import hydra
import yaml
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.trainer.config.convert import root_from_config, takes_null, takes_text, to_dataclass
from verl.trainer.config.errors import ConfigError, nearest, unknown_key_message
from verl.trainer.config.followers import followers
from verl.trainer.config.override import as_typed, read_override
from verl.trainer.config.schema import ConfigNode, PPOTrainerConfig

ResultT = TypeVar("ResultT")

CONFIG_DIR = Path(__file__).resolve().parent
CONFIG_NAME = "ppo_trainer"
PRESET_GROUP = "preset"
_HYDRA = ("hydra.", "hydra/")


@dataclass(frozen=True)
class Composition:
    """A composed configuration and where its values come from.

    Attributes:
        config: the configuration, interpolations unresolved.
        overrides: the overrides in the form Hydra is given, ``added_keys`` included.
        typed_keys: dotted names of the leaves set on the command line.
        preset_keys: dotted names of the leaves set by the preset.
        source_file: file name of the base configuration.
    """

    config: DictConfig
    overrides: list[str]
    typed_keys: frozenset[str]
    preset_keys: frozenset[str]
    source_file: str


def compose_config(
    overrides: Sequence[str] = (), config_dir: str | os.PathLike[str] | None = None, config_name: str = CONFIG_NAME
) -> DictConfig:
    """The configuration for a list of overrides, as Hydra would compose it on the command line.

    Args:
        overrides: ``key=value``, ``+new.key=value``, ``preset=embedded``.
        config_dir: folder of the base configuration, such as a run folder; None = the one of this package.
        config_name: file name of the base configuration without ``.yaml``.

    Raises:
        ConfigError: for an override that cannot be read or a key that does not exist.
    """
    return compose(overrides, config_dir, config_name).config


def default_config(*overrides: str) -> PPOTrainerConfig:
    """The typed configuration for some overrides: ``default_config("preset=embedded", "env.rollout.n=2")``."""
    return to_dataclass(compose_config(overrides))


def compose(
    overrides: Sequence[str] = (),
    config_dir: str | os.PathLike[str] | None = None,
    config_name: str = CONFIG_NAME,
    multirun: bool = False,
    root: type[ConfigNode] = PPOTrainerConfig,
) -> Composition:
    """As :func:`compose_config`, with the sources of the values.

    Args:
        multirun: an override may list values, ``data.seed=1,2``. The configuration is that of the first job then, and
            ``overrides`` have the list.
        root: the schema that the result is meant for.

    Raises:
        ConfigError: for overrides that cannot be used; its problems have values of the wrong type among the others too.
    """
    folder = Path(config_dir).expanduser().resolve() if config_dir is not None else CONFIG_DIR
    if not (folder / f"{config_name}.yaml").is_file():
        raise ConfigError(
            f"There is no configuration file {folder / (config_name + '.yaml')}; check --config-path and --config-name."
        )
    problems: list[str] = []
    parsed = [one for one in (_noted(problems, read_override, text) for text in overrides) if one is not None]
    has_presets, groups = _check_groups([one for one in parsed if _is_group(one)], folder, config_name, problems)
    _noted(problems, _check_hydra, [one for one in parsed if one.key_or_group.startswith(_HYDRA)], folder, config_name)
    changed = (folder / f"{config_name}.yaml").stat().st_mtime_ns
    chosen = [str((_of_first_job(one) if multirun else one).input_line) for one in groups]
    known, already, preset = _base(folder, config_name, tuple(chosen), changed)
    typed = [one for one in parsed if not _is_group(one) and not one.key_or_group.startswith("hydra.")]
    values, added = _check_values(typed, known, root, problems)
    ready = [str(one.input_line) for one in values]
    typed_keys = frozenset(leaf for one in values for leaf in _override_leaves(one))
    if values and folder != CONFIG_DIR and not re.search(r"^defaults:", _text(folder / f"{config_name}.yaml"), re.M):
        ready = [*_following(folder, config_name, changed, typed_keys), *ready]
    others = [one for one in parsed if one not in typed and (not _is_group(one) or one in groups)]
    ready = [str(one.input_line) for one in others] + ready
    if added:
        ready.append(f"++added_keys=[{','.join([*already, *added])}]")
    composed = [str(_of_first_job(read_override(text)).input_line) for text in ready] if multirun else ready
    if problems:  # what is wrong with the other values is said at the same time
        rest = [text for text in composed if not text.lstrip("+").startswith(_HYDRA)]
        _noted(problems, lambda: root_from_config(root, _compose(folder, config_name, rest)))
        raise ConfigError(*problems)
    return Composition(
        config=_compose(folder, config_name, composed),
        overrides=ready,
        typed_keys=typed_keys,
        preset_keys=frozenset(_preset_keys(preset) if has_presets else ()),
        source_file=f"{config_name}.yaml",
    )


def _noted(problems: list[str], check: Callable[..., ResultT], *arguments: Any) -> ResultT | None:
    """What ``check`` returns; None, and its lines in ``problems``, where it finds some."""
    try:
        return check(*arguments)
    except ConfigError as error:
        problems.extend(error.problems)
        return None


def _of_first_job(override: Override) -> Override:
    """The override that the first job of a multirun gets: the first of the values that are listed."""
    if not (override.is_choice_sweep() or override.is_range_sweep()):
        return override
    return read_override(f"{override.get_key_element()}={next(iter(override.sweep_string_iterator()))}")


def _is_group(override: Override) -> bool:
    key = override.key_or_group
    return key == PRESET_GROUP or "/" in key


def _check_groups(
    groups: Sequence[Override], folder: Path, config_name: str, problems: list[str]
) -> tuple[bool, list[Override]]:
    """Whether presets can be chosen for this base configuration, and the overrides that choose what is there."""
    selectable = "preset:" in _defaults_text(folder / f"{config_name}.yaml")
    names = sorted(path.stem for path in (CONFIG_DIR / PRESET_GROUP).glob("*.yaml"))
    sound = []
    for override in groups:
        listed = _of_first_job(override).value()
        if override.key_or_group != PRESET_GROUP or (selectable and str(listed) in names):
            sound.append(override)
        elif not selectable:
            problems.append(f"{config_name}.yaml holds the values of its preset already; leave out preset=...")
        else:
            value = str(listed)
            meant = nearest(value, names)
            problems.append(
                f"There is no preset {value!r}; "
                + (f"did you mean {meant}? There are: " if meant else "there are: ")
                + f"{', '.join(names)}."
            )
    return selectable, sound


def _check_hydra(settings: Sequence[Override], folder: Path, config_name: str) -> None:
    """Hydra's own settings (``hydra.run.dir``, ``hydra/launcher``): keys that do not exist, values that do not fit."""
    if not settings:
        return
    known = frozenset(_keys(_compose(folder, config_name, (), with_hydra=True).hydra, "hydra"))
    for override in settings:
        key = override.key_or_group
        if "/" not in key and key not in known and not (override.is_add() or override.is_force_add()):
            meant = nearest(key, known)
            hint = f"did you mean {meant}?" if meant else "--cfg hydra prints those there are."
            raise ConfigError(f"Hydra has no setting {key}; {hint}")
    _compose(folder, config_name, [str(one.input_line) for one in settings], with_hydra=True)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error})") from error


def _defaults_text(path: Path) -> str:
    """The defaults list of a YAML file as text; empty where it has none."""
    found = re.search(r"^defaults:[^\n]*\n((?:[ \t#-][^\n]*\n|\n)*)", _text(path), re.MULTILINE)
    return found.group(1) if found else ""


@functools.lru_cache(maxsize=64)
def _base(
    folder: Path, config_name: str, groups: tuple[str, ...], changed: int
) -> tuple[frozenset[str], tuple[str, ...], str]:
    """What a configuration holds before values are set: its keys, its added keys and its preset.

    Args:
        folder, config_name: the base file.
        groups: overrides that choose files, such as ``preset=embedded``.
        changed: modification time of the base file, so that an edited file is read again.
    """
    base = _compose(folder, config_name, groups)
    return (
        frozenset(_keys(base)),
        tuple(str(key) for key in base.get("added_keys") or []),
        str(base.get("preset", "none")),
    )


def _following(folder: Path, config_name: str, changed: int, typed_keys: frozenset[str]) -> list[str]:
    """Overrides that make keys of a resolved configuration follow others again, unless they were given a value."""
    found = _followers(folder, config_name, changed)
    return [f"{key}={text}" for key, text in found.items() if key not in typed_keys]


@functools.lru_cache(maxsize=64)
def _followers(folder: Path, config_name: str, changed: int) -> dict[str, str]:
    return followers(_compose(folder, config_name, ()), _compose(CONFIG_DIR, CONFIG_NAME, ()))


def _check_values(
    values: Sequence[Override], known: frozenset[str], root: type[ConfigNode], problems: list[str]
) -> tuple[list[Override], list[str]]:
    """Overrides as Hydra takes them, and the names of the keys they add; what gets a line in ``problems`` is left out.

    ``+key=`` on a key that exists sets it: scripts written when the key was not in the YAML keep working.
    """
    ready, added = [], []
    for override in values:
        key = override.key_or_group
        if override.is_delete():
            such_as = ", such as null" if takes_null(key) else ""
            problems.append(f"{key} cannot be removed; set another value{such_as}.")
            continue
        new = [leaf for leaf in _override_leaves(override) if leaf not in known]
        if new and not (override.is_add() or override.is_force_add()):
            problems.extend(unknown_key_message(one, known) for one in (new if key in known else [key]))
            continue
        added.extend(new)
        typed = as_typed(override) if takes_text(root, key) else override
        ready.append(read_override("++" + str(typed.input_line).lstrip("+")) if override.is_add() else typed)
    return ready, added


def _override_leaves(override: Override) -> Iterator[str]:
    value = None if override.is_sweep_override() or override.is_delete() else override.value()
    yield from _leaves(override.key_or_group, value)


def _leaves(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(f"{name}.{key}", item)
    else:
        yield name


def _keys(node: DictConfig, path: str = "") -> Iterator[str]:
    """Dotted names of all keys below a node, nodes included."""
    for key in node:
        name = f"{path}.{key}" if path else str(key)
        yield name
        if OmegaConf.is_interpolation(node, str(key)) or OmegaConf.is_missing(node, str(key)):
            continue
        child = node[key]
        if isinstance(child, DictConfig):
            yield from _keys(child, name)


def _preset_keys(preset: str) -> Iterator[str]:
    path = CONFIG_DIR / PRESET_GROUP / f"{preset}.yaml"
    if path.is_file():
        for key, value in OmegaConf.to_container(OmegaConf.load(path), resolve=False).items():
            yield from _leaves(str(key), value)


def search_path_override(folder: Path) -> list[str]:
    """Makes the files of this package known to a base configuration that lies elsewhere."""
    return [] if folder == CONFIG_DIR else [f"hydra.searchpath=[file://{CONFIG_DIR}]"]


def _compose(folder: Path, config_name: str, overrides: Sequence[str], with_hydra: bool = False) -> DictConfig:
    """What Hydra makes of the overrides; its own settings are left out, or part of the result ``with_hydra``."""
    taken = [one for one in overrides if with_hydra or not one.lstrip("+").startswith(_HYDRA)]
    try:
        with hydra.initialize_config_dir(config_dir=str(folder), version_base=None, job_name=config_name):
            taken += search_path_override(folder)
            return hydra.compose(config_name=config_name, overrides=taken, return_hydra_config=with_hydra)
    except yaml.YAMLError as error:
        raise ConfigError(f"{folder / config_name}.yaml is no YAML file: " + " ".join(str(error).split())) from error
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ if error.__cause__ is not None else error
        lines = [line for line in (str(error), str(cause)) if line]
        raise ConfigError("The configuration cannot be composed: " + " ".join(lines[0].split())) from error
