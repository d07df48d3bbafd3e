"""What a run that goes on from a checkpoint has other values of than the run that made it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from verl.trainer.config.schema import PPOTrainerConfig
from verl.utils.checkpoint.step_folder import TRACKER_FILE

RESOLVED_NAME = "resolved_config"
_MOST = 6  # keys that are named
_LONGEST = 200  # characters of a value

# Keys that may differ from one part of a run to the next: how long it is, what it writes, where it runs.
_FREE = ("trainer.", "ray_init.", "added_keys", "explain", "preset", "env.split_digest")


def changed_values(config: PPOTrainerConfig) -> str | None:
    """One line with the keys that have other values than in the run that the checkpoint is of; None if there is none.

    Call it before the run folder's ``resolved_config.yaml`` is written anew. A folder without one, or with one that
    cannot be read, says nothing; nor does ``trainer.val_only``, as nothing goes on then.
    """
    folder = _folder_to_resume(config)
    if folder is None:
        return None
    try:
        earlier = yaml.safe_load((folder / f"{RESOLVED_NAME}.yaml").read_text(encoding="utf-8"))
        before = dict(_leaves(earlier)) if isinstance(earlier, Mapping) else {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    now = dict(_leaves(yaml.safe_load(yaml.safe_dump(config.to_dict()))))
    kept = (key for key in now if key in before and not key.startswith(_FREE))
    changed = [key for key in kept if before[key] != now[key]]
    if not changed:
        return None
    named = [f"{key}={_shown(now[key])} (before: {_shown(before[key])})" for key in changed[:_MOST]]
    more = f" and {len(changed) - _MOST} more" if len(changed) > _MOST else ""
    return (
        f"this run goes on from a checkpoint in {folder} with other values: {', '.join(named)}{more}. If that is not "
        "meant, take another trainer.experiment_name, or start afresh with trainer.resume_mode=disable"
    )


def _folder_to_resume(config: PPOTrainerConfig) -> Path | None:
    trainer = config.trainer
    if trainer.val_only:
        return None
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path:
        return Path(trainer.resume_from_path).expanduser().absolute().parent
    root = Path(trainer.default_local_dir).expanduser()
    return root if trainer.resume_mode == "auto" and (root / TRACKER_FILE).is_file() else None


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
