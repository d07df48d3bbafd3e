"""What a run shows of its configuration: the values that are not those of ``ppo_trainer.yaml``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.trainer.config.compose import CONFIG_DIR, CONFIG_NAME
from verl.trainer.config.explain import shown
from verl.trainer.config.followers import followers
from verl.trainer.config.schema import PPOTrainerConfig

_NOT_SHOWN = ("explain", "added_keys")


def differences(config: PPOTrainerConfig) -> str:
    """The values that differ from the defaults, a line each below its section, and how many there are.

    A key that follows another in ``ppo_trainer.yaml`` and has the value that it gets from it is left out.
    """
    original = OmegaConf.load(CONFIG_DIR / f"{CONFIG_NAME}.yaml")
    assert isinstance(original, DictConfig)
    defaults = dict(_leaves(OmegaConf.to_container(original, resolve=True)))
    tree = config.to_dict()
    values = dict(_leaves(tree))
    following = followers(OmegaConf.create(tree), original)
    lines, count, section = [], 0, None
    for key, value in values.items():
        if key in _NOT_SHOWN or key in following or (key in defaults and defaults[key] == value):
            continue
        above, _, name = key.rpartition(".")
        if above != section and above:
            lines.append(f"  {above}:")
        lines.append(f"{'    ' if above else '  '}{name}: {shown(value)}")
        count, section = count + 1, above
    said = f"{count or 'none'} of {len(values)} values differ from {CONFIG_NAME}.yaml (explain=true prints all)"
    return "\n".join([said + (":" if count else ""), *lines])


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; an empty mapping is a value."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value
