"""What the rollout loop knows of an episode, and the seed of each of its requests."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np


def request_seed(*parts: int | str) -> int:
    """A 31-bit seed that depends on ``parts`` alone, not on the order or time in which seeds are asked for.

    The parts of a training request are the run seed, the training step, group, attempt, member and turn.
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass
class Turn:
    """One agent step: one row of the training batch.

    Attributes:
        prompt_ids: int32 ``(prompt_length,)``, as the engine got it.
        response_ids: int32 ``(response_length,)``, exactly as sampled.
        log_probs: float32 ``(response_length,)`` of the engine.
        anchor: the state in which the agent acted.
        reward: what the environment gave for the action.
        prompt_text: what the environment asked, before any cut; only where the rollout keeps it.
    """

    prompt_ids: np.ndarray
    anchor: Any
    response_ids: np.ndarray | None = None
    log_probs: np.ndarray | None = None
    finish_reason: str = ""
    reward: float = 0.0
    prompt_text: str | None = None
    info: dict[str, Any] = field(default_factory=dict)


@dataclass
class Episode:
    """One play of one task by one group member.

    Attributes:
        group: number of its group in the rollout, in the order the groups started.
        attempt: 0 for a group that started with the rollout, 1, 2, … for those that replaced another.
        baseline: played greedily, for its reward alone (ReMax).
        data_source: where its task is from.
        lag: updates of the policy since it was played.
        turns: completed turns, in order.
        pending: the turn whose response or reward is on its way.
        retries: how often it started again after its environment failed by its own doing.
        restarts: how often it started again at all.
        infra_failed: the environment failed for good; the turns mean nothing.
        prompt_overflow: ended because its prompt no longer fitted.
    """

    slot: int
    group: int
    member: int
    attempt: int
    uid: str
    traj_uid: str
    task_id: str = ""
    baseline: bool = False
    data_source: str = "unknown"
    lag: int = 0
    turns: list[Turn] = field(default_factory=list)
    pending: Turn | None = None
    retries: int = 0
    restarts: int = 0
    infra_failed: bool = False
    prompt_overflow: bool = False

    @property
    def reward(self) -> float:
        return float(np.sum([turn.reward for turn in self.turns], dtype=np.float32))

    @property
    def tool_callings(self) -> float:
        return float(sum(turn.info.get("tool_calling", 0.0) for turn in self.turns))

    @property
    def counts(self) -> bool:
        """Whether it has rows for the batch."""
        return not self.infra_failed and bool(self.turns)
