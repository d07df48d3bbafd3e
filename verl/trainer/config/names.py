"""Names that settings choose from and that are registered elsewhere; a test keeps them equal to the registries.

Beside them the rule for names of the user's own that become folders.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from verl.trainer.config.errors import nearest

ADV_ESTIMATORS = (
    "gae",
    "grpo",
    "grpo_passk",
    "gigpo",
    "hgpo",
    "rloo",
    "remax",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
)
GROUP_ESTIMATORS = ("grpo", "grpo_passk", "gigpo", "hgpo", "rloo", "reinforce_plus_plus_baseline")
ENVIRONMENTS = ("webshop",)
POLICY_LOSSES = ("vanilla", "gspo", "cispo", "clip_cov", "kl_cov", "gpg")
TRACKERS = ("console", "wandb", "tensorboard", "mlflow", "swanlab", "clearml", "vemlp_wandb")


def environment_meant(env_name: str, known: Iterable[str]) -> str | None:
    """The registered environment that ``env_name`` means, None where there is none.

    It is the one of the same name in any case, else the longest that is a whole part of it: one with no letter before
    or behind it. A name that is more like another registered one is taken for that one misspelt, and means none.

    >>> environment_meant("my/Webshop-v2", ["webshop"]), environment_meant("notwebshop", ["webshop"])
    ('webshop', None)
    """
    wanted, names = env_name.lower(), list(known)
    if wanted in names:
        return wanted
    parts = [name for name in names if re.search(rf"(?<![^\W\d_]){re.escape(name)}(?![^\W\d_])", wanted)]
    part = max(parts, key=len, default=None)
    return part if part and nearest(wanted, names) in (None, *parts) else None


def unknown_environment(env_name: str, known: Iterable[str]) -> str:
    """The start of a message about an ``env.env_name`` that means no environment: what was meant, what there is."""
    names = list(known)
    meant = nearest(env_name.lower(), names)
    return (
        f"env.env_name={env_name} is not a known environment; "
        + (f"did you mean {meant}? There are " if meant else "there are ")
        + ", ".join(names)
    )


def folder_name_problem(key: str, name: str) -> str | None:
    """What is wrong with a name that becomes a folder below ``checkpoints/``; None where nothing is.

    ``a/b`` makes two folders; a name that leads out of ``checkpoints/``, or to no folder of its own, is refused.
    """
    parts = name.split("/")
    if PurePosixPath(name).is_absolute() or ".." in parts:
        trouble = "would lead out of the folder checkpoints/"
    elif not name.strip() or "." in parts or "" in parts:
        trouble = "names no folder of its own"
    elif not name.isprintable():
        trouble = "has characters that no name of a folder should have"
    else:
        return None
    return f"{key}={name!r} {trouble}; use a plain name, and trainer.default_local_dir for a folder elsewhere"
