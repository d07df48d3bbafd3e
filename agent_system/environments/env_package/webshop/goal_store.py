"""Goal lists kept on disk, and which goals are for training and which for validation."""

from __future__ import annotations

import hashlib
import logging
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agent_system.environments.env_package.webshop.catalogue import Catalogue
from agent_system.environments.env_package.webshop.goals import (
    SHUFFLE_SEED,
    GoalSeeding,
    GoalSet,
    build_goals,
    cumulative_weights,
)
from agent_system.environments.env_package.webshop.options import PREFIX
from agent_system.environments.env_package.webshop.storage import (
    code_digest,
    open_array,
    open_or_build,
    save_array,
)

logger = logging.getLogger(__name__)

_ARRAYS = ("prices", "rows", "variants", "caps", "weights", "cumulative")


@dataclass(frozen=True)
class GoalSplit:
    """Goals ``0 .. validation-1`` are for validation, ``validation .. total-1`` for training.

    digest: 16 hex digits over the goals in order and where validation ends; equal digests mean equal tasks.
    """

    total: int
    num_validation: int
    digest: str

    @property
    def validation(self) -> range:
        return range(min(self.num_validation, self.total))

    @property
    def training(self) -> range:
        return range(self.num_validation, self.total)

    def check(self, training_needed: int = 1) -> None:
        """Raise ValueError unless there are that many training goals; the message says what would fit."""
        if len(self.training) >= training_needed:
            return
        most = self.total - training_needed
        fit = f"; with this catalogue {PREFIX}.validation_goals may be at most {most}" if most >= 0 else ""
        raise ValueError(
            f"the shop has {self.total} goals, of which the first {self.num_validation} are for validation: "
            f"{len(self.training)} are left where {training_needed} different training goals are needed. Use more "
            f"products ({PREFIX}.num_products, {PREFIX}.data_dir) or fewer validation goals{fit}"
        )


def split_goals(goals: GoalSet, num_validation: int) -> GoalSplit:
    return GoalSplit(len(goals), num_validation, goals.digest(num_validation))


def open_goals(
    catalogue: Catalogue,
    human: bool,
    cache_dir: str | Path,
    *,
    seeding: GoalSeeding | None = None,
    limit: int | None = None,
    timeout: float = 7200.0,
) -> GoalSet:
    """The goal list of a catalogue, memory-mapped; built first if this machine has none.

    Arguments as for :func:`.goals.build_goals`; ``timeout`` as for :meth:`.catalogue.Catalogue.build`.
    """
    seeding = GoalSeeding() if seeding is None else seeding
    code = code_digest("goals.py", "goal_store.py")
    recipe = f"goals {code} {catalogue.key} {human} {seeding.before} {seeding.shuffle} {limit}"
    key = "goals-" + hashlib.sha256(recipe.encode()).hexdigest()[:24]

    def write(folder: Path) -> dict[str, Any]:
        logger.info("making the goal list of %s products", f"{len(catalogue):,}")
        goals = build_goals(catalogue, human, seeding=seeding, rng=random.Random(SHUFFLE_SEED), limit=limit)
        arrays = {name: getattr(goals, name) for name in _ARRAYS if name != "cumulative"}
        arrays["cumulative"] = cumulative_weights(goals.weights)
        for name, values in arrays.items():
            save_array(folder, name, np.asarray(values))
        return {"goals": len(goals)}

    folder, _ = open_or_build(Path(cache_dir), key, write, timeout, "the goal list")
    opened = {name: open_array(folder, name) for name in _ARRAYS}
    return GoalSet(catalogue, human, **opened)
