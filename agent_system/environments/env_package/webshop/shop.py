"""The shop that sessions share: catalogue, goals and recent searches; and opening one from its options."""

from __future__ import annotations

import logging
import operator
import random
import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from agent_system.environments.env_package.webshop.catalogue import Catalogue
from agent_system.environments.env_package.webshop.goal_store import GoalSplit, open_goals, split_goals
from agent_system.environments.env_package.webshop.goals import GoalSeeding, GoalSet
from agent_system.environments.env_package.webshop.nouns import noun_source
from agent_system.environments.env_package.webshop.options import ShopOptions
from agent_system.environments.env_package.webshop.reward import Reward, score_purchase
from agent_system.environments.env_package.webshop.sources import ProductFiles, source_of

logger = logging.getLogger(__name__)

_RANDOM_RESULTS = 50
_CACHED_SEARCHES = 4096
_KEPT_SESSIONS = 16384


class SessionGoals:
    """Which goal a session name stands for: kept for the most recent names, so that memory stays bounded."""

    def __init__(self, limit: int = _KEPT_SESSIONS) -> None:
        self._limit = limit
        self._goals: OrderedDict[str, int] = OrderedDict()

    def get(self, name: str) -> int | None:
        return self._goals.get(name)

    def put(self, name: str, goal: int) -> None:
        self._goals[name] = goal
        self._goals.move_to_end(name)
        if len(self._goals) > self._limit:
            self._goals.popitem(last=False)


class ShopServer:
    """What the sessions of a process share. Sessions of several threads may use it."""

    def __init__(self, catalogue: Catalogue, goals: GoalSet, options: ShopOptions | None = None) -> None:
        self.catalogue = catalogue
        self.goals = goals
        self.options = ShopOptions() if options is None else options
        self.session_goals = SessionGoals()
        self.assigned_instruction_text: str | None = None
        self._searches: OrderedDict[str, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()
        self._split: GoalSplit | None = None
        self._workers: dict[int, ShopServer] = {}

    @property
    def split(self) -> GoalSplit:
        """Which goals are for validation and which for training."""
        if self._split is None:
            self._split = split_goals(self.goals, self.options.validation_goals)
        return self._split

    def for_worker(self, seed: int) -> ShopServer:
        """The shop with the goal list of a worker's seed under ``compat_seeding``; else this shop."""
        if not self.options.compat_seeding:
            return self
        with self._lock:
            shop = self._workers.get(seed)
            if shop is None:
                goals = _open_goals(self.catalogue, self.options, GoalSeeding.verl_agent(seed))
                shop = ShopServer(self.catalogue, goals, self.options)
                shop._searches, shop._lock = self._searches, self._lock
                self._workers[seed] = shop
        return shop

    def check_goal_index(self, index: int) -> int:
        """``index`` as a Python integer.

        Raises:
            ValueError: it is no integer, or there is no such goal.
        """
        try:
            index = operator.index(index)
        except TypeError:
            raise ValueError(f"a goal index is an integer from 0 to {len(self.goals) - 1}, got {index!r}") from None
        if not 0 <= index < len(self.goals):
            raise ValueError(f"goal index {index} is outside 0 to {len(self.goals) - 1}")
        return index

    def search(self, query: str, rng: random.Random) -> np.ndarray:
        """Rows that a query finds, best first.

        ``<r>`` finds 50 random products, ``<c> word`` those of a category, ``<q> words`` those of a query, and ``<a>``
        nothing, since the original's index of attributes never reaches its text environment.
        """
        first, _, rest = query.partition(" ")
        if first == "<r>":
            return self._random_rows(rng)
        if first == "<a>":
            if self.options.original_quirks:
                raise TypeError("a search by attribute fails in the original's text environment")
            return np.zeros(0, dtype=np.int32)
        with self._lock:
            found = self._searches.get(query)
            if found is not None:
                self._searches.move_to_end(query)
                return found
        if first == "<c>":
            words = query.split(" ")
            if len(words) < 2:
                if self.options.original_quirks:
                    raise IndexError("a search by category needs a word after <c>")
                words.append("")
            found = self.catalogue.rows_with("category", words[1].strip())
        elif first == "<q>":
            found = self.catalogue.rows_with("query", rest.strip())
        else:
            found, _ = self.catalogue.index.search(query, strict=self.options.original_quirks)
        if len(query) <= 1000:  # a cache of huge queries would be a way to fill the memory
            with self._lock:
                self._searches[query] = found
                if len(self._searches) > _CACHED_SEARCHES:
                    self._searches.popitem(last=False)
        return found

    def _random_rows(self, rng: random.Random) -> np.ndarray:
        count = _RANDOM_RESULTS
        if not self.options.original_quirks:
            count = min(count, len(self.catalogue))
        return np.asarray(rng.sample(range(len(self.catalogue)), count), dtype=np.int32)

    def score(self, row: int, options: dict[str, str], goal_index: int) -> Reward:
        """The reward of buying the product of a row for a goal."""
        goal = self.goals[goal_index]
        return score_purchase(
            self.catalogue.product(row),
            goal,
            price=float(self.goals.prices[row]),
            options=options,
            product_nouns=self.catalogue.nouns(row),
            goal_nouns=self.catalogue.nouns(int(self.goals.rows[goal_index])),
        )


def open_catalogue(options: ShopOptions, files: ProductFiles | None = None) -> Catalogue:
    """The catalogue that options (or ``files``) name, built if this machine has none yet."""
    nouns = noun_source(options.noun_source)
    source = source_of(options, files)
    return Catalogue.build(source, options.cache_path, noun_source=nouns, timeout=options.build_timeout)


def load_shop(webshop_config: Any = None, **overrides: Any) -> ShopServer:
    """The shop of a config.

    Args:
        webshop_config: ``env.webshop`` (dataclass, mapping or any object with its names); missing names take defaults.
        overrides: options that win over the config's.

    Raises:
        ValueError: a setting or a data file cannot be used; the message says which.
    """
    options = ShopOptions.from_config(webshop_config, **overrides)
    catalogue = open_catalogue(options)
    if options.compat_seeding:
        logger.warning(
            "env.webshop.compat_seeding: goals are shuffled per worker seed, as verl-agent does; validation goals of "
            "one worker are training goals of another, so scores on them do not measure generalisation"
        )
        return ShopServer(catalogue, _open_goals(catalogue, options, GoalSeeding.verl_agent(0)), options)
    return ShopServer(catalogue, _open_goals(catalogue, options, None), options)


def _open_goals(catalogue: Catalogue, options: ShopOptions, seeding: GoalSeeding | None) -> GoalSet:
    return open_goals(
        catalogue,
        options.human_goals,
        options.cache_path,
        seeding=seeding,
        limit=options.limit_goals,
        timeout=options.build_timeout,
    )
