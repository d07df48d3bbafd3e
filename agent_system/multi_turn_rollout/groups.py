"""Which groups a rollout plays, which of them it keeps, and what is left over.

Groups are numbered in the order they start. With filtering (DAPO, arXiv 2503.14476, eq. 11) a group whose episodes
all got the same reward is *dead*: it teaches nothing, and the next number starts at once in its slots if the useful
groups and those still running are fewer than wanted. So the numbers that get played are the fewest that hold enough
useful groups, and the batch, the useful ones of lowest number, does not depend on which of them end first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agent_system.multi_turn_rollout.episode import Episode

Group = list[Episode]


@dataclass
class GroupChoice:
    """Keeps count of the groups of one rollout.

    Attributes:
        wanted: groups of the batch.
        most: groups played at most.
        filtering: whether dead groups are replaced; else every group is kept.
    """

    wanted: int
    most: int
    filtering: bool
    started: int = 0
    _useful: dict[int, Group] = field(default_factory=dict)
    _dead: dict[int, Group] = field(default_factory=dict)

    def start(self, count: int) -> range:
        """The numbers of the next ``count`` groups."""
        self.started += count
        return range(self.started - count, self.started)

    def close(self, number: int, members: Group) -> None:
        """Group ``number`` is through."""
        alive = rewards_differ(members) or not self.filtering
        (self._useful if alive else self._dead)[number] = members

    @property
    def needs_another(self) -> bool:
        """Whether a further group has to start."""
        running = self.started - len(self._useful) - len(self._dead)
        return len(self._useful) + running < self.wanted and self.started < self.most

    def kept(self) -> list[Group]:
        """The batch, by number; short of useful groups the last dead ones complete it."""
        missing = max(0, self.wanted - len(self._useful))
        last_dead = sorted(self._dead)[len(self._dead) - missing :] if missing else []
        numbers = sorted(sorted(self._useful)[: self.wanted] + last_dead)
        return [self._useful.get(number) or self._dead[number] for number in numbers]

    def surplus(self) -> list[Group]:
        """The useful groups that the batch has no room for, by number."""
        return [self._useful[number] for number in sorted(self._useful)[self.wanted :]]

    def metrics(self) -> dict[str, float]:
        """``rollout/groups_*``; dead are those of equal rewards, whether they are kept or not."""
        closed = [*self._useful.values(), *self._dead.values()]
        dead = sum(not rewards_differ(members) for members in closed)
        return {
            "rollout/groups_played": float(len(closed)),
            "rollout/groups_dropped": float(len(self._dead) - max(0, self.wanted - len(self._useful))),
            "rollout/groups_surplus": float(len(self.surplus())),
            "rollout/dead_group_share": dead / len(closed) if closed else 0.0,
        }


def rewards_differ(members: Sequence[Episode]) -> bool:
    """Whether the episodes that will be learned from got different rewards."""
    return len({episode.reward for episode in members if episode.counts and not episode.baseline}) > 1


def carried_on(groups: Sequence[Group]) -> list[Group]:
    """``groups`` as they enter the next batch: sampled by a policy that is one more update old."""
    for members in groups:
        for episode in members:
            episode.lag += 1
    return list(groups)
