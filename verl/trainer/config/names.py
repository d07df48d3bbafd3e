"""Names that settings choose from and that are registered elsewhere; a test keeps them equal to the registries.

Beside them the rule for names of the user's own that become folders.
"""

from __future__ import annotations

from pathlib import PurePosixPath

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
