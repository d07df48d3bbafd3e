"""The vectorised WebShop: which goals are played, and the sessions that play them.

Goals 0–499 are for validation, the rest for training. Training draws from a seeded stream in which every goal comes
once before any comes again; validation plays a fixed list, the same at every evaluation. The group size says how many
consecutive slots play the same goal.

``env.webshop.compat_seeding=true`` does as verl-agent does instead: every group has a goal list of its own order,
and goals are drawn independently at every reset, in validation too, so that its tasks change from one evaluation to
the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import ray

from agent_system.environments.session_host import Raw, SessionFactory, SessionPool, count_hosts

VALIDATION_GOALS = 500
PERFECT_PURCHASE_REWARD = 10.0

Task = int | tuple[int, int]  # a goal, or a worker seed and a goal in the list of that seed


class WebshopSession:
    """One shop session with the reward of the training task: 10 for a perfect purchase, else 0.

    The shop's own score stays in ``info["task_score"]``. After the purchase the page stays as it is: a further step
    changes nothing and brings no reward.

    Args:
        open_session: makes a session of the shop whose goal list has a worker's seed, or of the shop itself for None.
    """

    def __init__(self, open_session: Callable[[int | None], Any]) -> None:
        self._open_session = open_session
        self._shop: Any = None
        self._seed: int | None = None
        self._last: dict[str, Any] = {}

    def reset(self, task: Task) -> Raw:
        seed, goal = task if isinstance(task, tuple) else (None, task)
        if self._shop is None or seed != self._seed:
            self._shop, self._seed = self._open_session(seed), seed
        return self._reply(self._shop.reset(int(goal)), done=False, score=0.0)

    def step(self, action: str) -> Raw:
        if self._last["done"]:
            return self._last | {"reward": 0.0}
        page, score, done, _ = self._shop.step(action)
        return self._reply(page, bool(done), float(score))

    def _reply(self, page: str, done: bool, score: float) -> Raw:
        won = done and score == 1.0
        self._last = {
            "observation": page,
            "reward": PERFECT_PURCHASE_REWARD if won else 0.0,
            "done": done,
            "info": {"available_actions": self._shop.available_actions(), "task_score": score, "won": won},
        }
        return self._last


class WebshopSessions:
    """What makes the sessions of one process: the shop they share, opened once."""

    def __init__(self, webshop_config: Any) -> None:
        from agent_system.environments.env_package.webshop.session import ShopSession, load_shop

        self.server = load_shop(webshop_config)
        self._session_class = ShopSession

    def __call__(self) -> WebshopSession:
        return WebshopSession(self._open)

    def _open(self, seed: int | None) -> Any:
        return self._session_class(self.server if seed is None else self.server.for_worker(seed))


def _split(sessions: WebshopSessions) -> tuple[int, int, str]:
    """Number of goals, how many of them are for validation, and the digest of the split."""
    split = sessions.server.split
    return split.total, split.num_validation, split.digest


class TrainingGoals:
    """Goals ``first .. num_goals-1`` in a seeded order, a new order each time all have been played.

    What group ``g`` plays first in a rollout, and what the ``a``-th group plays that replaces another, is fixed by the
    seed and by how many goals were drawn before; it does not depend on which group is replaced.
    """

    def __init__(self, num_goals: int, num_groups: int, seed: int, first: int = VALIDATION_GOALS) -> None:
        _check_count(num_goals - first, num_groups, "training", "data.train_batch_size")
        self._first, self._count, self._seed = first, num_goals - first, seed
        self._drawn = 0
        self.new_rollout()

    def task(self, group: int, attempt: int, block: int) -> int:
        if attempt == 0:
            self._at_once = max(self._at_once, group + 1)
        position = self._begin + (group if attempt == 0 else self._at_once + attempt - 1)
        self._drawn = max(self._drawn, position + 1)
        return self._at(position)

    def new_rollout(self) -> None:
        self._begin = self._drawn
        self._at_once = 0  # groups that started with the rollout

    def _at(self, position: int) -> int:
        round_number, index = divmod(position, self._count)
        return self._first + int(self._order(round_number)[index])

    def _order(self, round_number: int) -> np.ndarray:
        return np.random.default_rng([self._seed, round_number]).permutation(self._count)

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self._drawn, "goals": self._count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["goals"] != self._count:
            raise ValueError(
                f"the checkpoint was made with {state['goals']} training goals, this shop has {self._count}: "
                "env.webshop.* must be what it was, or set trainer.resume_mode=disable"
            )
        self._drawn = state["drawn"]
        self.new_rollout()


class ValidationGoals:
    """A fixed order of the validation goals, spread evenly over them however many are played.

    Block ``b`` of ``num_groups`` tasks is the ``b``-th part of that order. A larger set contains every smaller one.
    """

    def __init__(self, num_goals: int, num_groups: int, count: int = VALIDATION_GOALS) -> None:
        self._order = spread_order(min(num_goals, count))
        self._groups = num_groups

    def task(self, group: int, attempt: int, block: int) -> int:
        position = block * self._groups + group
        if position >= len(self._order):
            raise ValueError(
                f"there are {len(self._order)} validation tasks and each is played once: the validation data "
                f"(data.val_files, data.val_batch_size) ask for task number {position + 1}"
            )
        return self._order[position]

    def new_rollout(self) -> None:
        """Nothing is remembered between rollouts."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """There is no state."""


class CompatibleGoals:
    """verl-agent's draws: distinct goal numbers at every reset from one ``RandomState``, in validation too.

    Group ``g`` uses the goal list of worker seed ``seed + g``. Groups that replace others take the places of further
    draws one by one.
    """

    def __init__(
        self, num_goals: int, num_groups: int, seed: int, is_train: bool, num_validation: int = VALIDATION_GOALS
    ) -> None:
        self._goals = np.arange(num_validation, num_goals) if is_train else np.arange(min(num_validation, num_goals))
        kind, key = ("training", "data.train_batch_size") if is_train else ("validation", "data.val_batch_size")
        _check_count(len(self._goals), num_groups, kind, key)
        self._groups, self._seed = num_groups, seed
        self.load_state_dict({"draws": 0})

    def task(self, group: int, attempt: int, block: int) -> tuple[int, int]:
        later, next_place = divmod(attempt - 1, self._groups)
        wave, place = (0, group) if attempt == 0 else (1 + later, next_place)
        while len(self._waves) <= wave:
            self._waves.append(self._draw())
        return self._seed + place, int(self._waves[wave][place])

    def new_rollout(self) -> None:
        self._waves = []

    def _draw(self) -> np.ndarray:
        self._draws += 1
        return self._rng.choice(self._goals, size=self._groups, replace=False)

    def state_dict(self) -> dict[str, int]:
        return {"draws": self._draws}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._rng = np.random.RandomState(self._seed)
        self._draws = 0
        self._waves: list[np.ndarray] = []
        for _ in range(state["draws"]):
            self._draw()


def _check_count(available: int, needed: int, kind: str, key: str) -> None:
    if available < needed:
        raise ValueError(
            f"the shop has {max(available, 0)} {kind} goals, too few for the {needed} tasks of a batch: lower {key}, "
            "or use more products (env.webshop.num_products, env.webshop.data_dir) or other instructions "
            "(env.webshop.human_goals)"
        )


def spread_order(count: int) -> list[int]:
    """``0 .. count-1`` in an order whose every beginning lies evenly over the range (steps of the golden ratio)."""
    stride = max(1, round(count * (math.sqrt(5) - 1) / 2))
    while math.gcd(stride, count) != 1:
        stride += 1
    return [(i * stride) % count for i in range(count)]


class WebshopVectorEnv:
    """``num_groups × group_size`` WebShop sessions in the hosts of a pool.

    Args:
        pool: where the sessions live; training and validation share one.
        goals: which goal each group plays.
        num_groups: different goals at a time.
        group_size: sessions per goal.
        namespace: tells the sessions of this environment from others in the same pool.
        owns_pool: whether ``close`` ends the pool.
        split_digest: names the split of goals into training and validation; equal digests mean equal tasks.
    """

    def __init__(
        self,
        pool: SessionPool,
        goals: Any,
        num_groups: int,
        group_size: int,
        namespace: str,
        owns_pool: bool = True,
        split_digest: str = "",
    ) -> None:
        self.split_digest = split_digest
        self.num_groups, self.group_size = num_groups, group_size
        self.num_episodes = num_groups * group_size
        self._pool, self._goals, self._namespace, self.owns_pool = pool, goals, namespace, owns_pool

    def draw(self, groups: Sequence[int], attempt: int = 0, block: int = 0) -> list[tuple[int, Task]]:
        """``(slot, goal)`` for every slot of ``groups``."""
        if attempt == 0:
            self._goals.new_rollout()
        tasks = []
        for group in groups:
            goal = self._goals.task(group, attempt, block)
            tasks += [(group * self.group_size + member, goal) for member in range(self.group_size)]
        return tasks

    def submit_resets(self, tasks: Sequence[tuple[int, Task]], fresh: bool = False) -> list[ray.ObjectRef]:
        return self._pool.submit_resets(tasks, self._namespace, fresh)

    def submit_steps(self, actions: Sequence[tuple[int, str]]) -> list[ray.ObjectRef]:
        return self._pool.submit_steps(actions, self._namespace)

    def collect(self, ref: ray.ObjectRef) -> list[tuple[int, Raw]]:
        return self._pool.collect(ref)

    def expire(self, ref: ray.ObjectRef, reason: str) -> list[tuple[int, Raw]]:
        return self._pool.expire(ref, reason)

    def state_dict(self) -> dict[str, int]:
        """Position in the stream of goals."""
        return self._goals.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._goals.load_state_dict(state)

    def close(self) -> None:
        if self.owns_pool:
            self._pool.close()


def make_pool(
    webshop_config: Any,
    num_episodes: int,
    resources_per_worker: Any,
    num_workers: int | None = None,
    builder: Callable[[Any], SessionFactory] = WebshopSessions,
    **limits: float,
) -> SessionPool:
    """A pool of as many hosts as ``num_episodes`` sessions of these resources deserve."""
    hosts = count_hosts(num_episodes, resources_per_worker.num_cpus, num_workers)
    gpus = min(1.0, resources_per_worker.num_gpus * num_episodes / hosts)
    return SessionPool(partial(builder, webshop_config), hosts, num_gpus=gpus, **limits)


def build_webshop_envs(
    seed: int,
    env_num: int,
    group_n: int,
    resources_per_worker: Any,
    is_train: bool = True,
    env_kwargs: Any = None,
    pool: SessionPool | None = None,
) -> WebshopVectorEnv:
    """A vectorised WebShop.

    Args:
        seed: of the stream of training goals.
        env_num: number of different goals at a time.
        group_n: sessions per goal.
        resources_per_worker: with ``num_cpus`` and ``num_gpus`` per session.
        is_train: goals 500 and above in a seeded order, else the fixed validation goals.
        env_kwargs: the ``env.webshop`` part of the configuration.
        pool: of another environment to share hosts with.

    Raises:
        ValueError: the shop has too few goals.
    """
    own_pool = pool is None
    pool = pool or make_pool(env_kwargs, env_num * group_n, resources_per_worker)
    total, num_validation, digest = pool.call(_split)
    goals: Any
    if env_kwargs.compat_seeding:
        goals = CompatibleGoals(total, env_num, seed, is_train, num_validation)
    elif is_train:
        goals = TrainingGoals(total, env_num, seed, num_validation)
    else:
        goals = ValidationGoals(total, env_num, num_validation)
    name = "train" if is_train else "val"
    return WebshopVectorEnv(pool, goals, env_num, group_n, name, own_pool, digest)
