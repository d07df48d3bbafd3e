"""What a run that goes on from a checkpoint has other values of than the run that made it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from verl.trainer.config.schema import PPOTrainerConfig
from verl.utils.checkpoint.step_folder import find_checkpoint

RESOLVED_NAME = "resolved_config"
_MOST = 6  # keys that are named
_LONGEST = 200  # characters of a value

# Keys that may differ from one part of a run to the next: how long it is, what it writes, where it runs.
_FREE = ("trainer.", "ray_init.", "added_keys", "explain", "preset", "env.split_digest")


def changed_values(config: PPOTrainerConfig) -> str | None:
    """One line with the keys that have other values than in the run that the checkpoint is of; None if there is none.

    A checkpoint holds the ``resolved_config.yaml`` of its run; that of the run folder may be of a later one, which
    ended before it saved. It counts for a checkpoint that holds none, so call this before it is written anew, and only
    where there are steps left to train. A file that cannot be read says nothing; nor does ``trainer.val_only``, as
    nothing goes on then.
    """
    checkpoint = _checkpoint_to_resume(config)
    if checkpoint is None:
        return None
    folder = checkpoint.parent
    own = checkpoint / f"{RESOLVED_NAME}.yaml"
    before = recorded_values(own if own.is_file() else folder / own.name)
    now = dict(_leaves(yaml.safe_load(yaml.safe_dump(config.to_dict()))))
    kept = (key for key in now if key in before and not key.startswith(_FREE))
    changed = [key for key in kept if before[key] != now[key]]
    if not changed:
        return None
    changed.sort(key=lambda key: ".optim." not in key)  # never among those that are only counted: no one else says them
    named = [f"{key}={_shown(now[key])} (before: {_shown(before[key])})" for key in changed[:_MOST]]
    more = f" and {len(changed) - _MOST} more" if len(changed) > _MOST else ""
    return (
        f"this run goes on from a checkpoint in {folder} with other values: {', '.join(named)}{more}. If that is not "
        "meant, take another trainer.experiment_name, or start afresh with trainer.resume_mode=disable"
    )


def recorded_values(file: Path) -> dict[str, Any]:
    """Dotted keys and values of a ``resolved_config.yaml``; none where it cannot be read."""
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        return dict(_leaves(tree)) if isinstance(tree, Mapping) else {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}


def _checkpoint_to_resume(config: PPOTrainerConfig) -> Path | None:
    trainer = config.trainer
    if trainer.val_only:
        return None
    try:
        root = Path(trainer.default_local_dir).expanduser().absolute()
        return find_checkpoint(trainer.resume_mode, trainer.resume_from_path, root)
    except ValueError:  # the run ends with it before anything is started
        return None


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; a list is one value."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
