"""``WebAgentTextEnv``: the shop behind the constructor, methods and return values that WebShop's users know.

One page at a time as text, ``search[...]`` and ``click[...]`` actions, the four-tuple of old gym. The gym and gymnasium
registrations wrap this class; a trainer that hosts many episodes uses :class:`.session.ShopSession` directly.
"""

from __future__ import annotations

import logging
import numbers
import random
import string
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent_system.environments.env_package.webshop.goals import GoalSeeding, build_goals
from agent_system.environments.env_package.webshop.options import ShopOptions
from agent_system.environments.env_package.webshop.pages import SEPARATOR
from agent_system.environments.env_package.webshop.session import ShopSession
from agent_system.environments.env_package.webshop.shop import ShopServer, open_catalogue
from agent_system.environments.env_package.webshop.sources import ProductFiles

logger = logging.getLogger(__name__)


class WebAgentTextEnv:
    """WebShop as a text environment.

    Args:
        observation_mode: ``text``, ``text_rich``, ``html`` or ``url``.
        file_path: the product file, beside the attribute and instruction files; None is the embedded shop.
        server: a shop to share; the arguments that shape one are then unused.
        attr_path, human_attr_path: attribute and human instruction file, when they are not beside ``file_path``.
        filter_goals: ``(index, goal) -> keep``.
        limit_goals: keep that many goals, drawn by weight; -1 keeps all.
        num_products: records to read.
        human_goals: instructions that people wrote.
        show_attrs: offer the attributes page.
        session: kept as an attribute, not used by ``reset``, as in the original.
        session_prefix: goes before every session id.
        num_prev_obs, num_prev_actions: how much history the returned state has.
        get_image: only False; the original's picture features are not part of its published data.
        seed: seeds goals and random draws as verl-agent's copy does; None is the fixed goal list and draws from the
            system.
        auto_reset: start the next random session right after a purchase, as verl-agent's copy does.
        rng: generator of random draws, instead of one made from ``seed``.
        options: further keys of ``env.webshop``, such as ``cache_dir`` or ``original_quirks``.

    Raises:
        ValueError: an argument or a data file cannot be used; the message says which.
    """

    def __init__(
        self,
        observation_mode: str = "html",
        file_path: str | Path | None = None,
        server: ShopServer | None = None,
        *,
        attr_path: str | Path | None = None,
        human_attr_path: str | Path | None = None,
        filter_goals: Callable[[int, dict[str, Any]], bool] | None = None,
        limit_goals: int = -1,
        num_products: int | None = None,
        human_goals: bool | None = None,
        show_attrs: bool = False,
        session: Any = None,
        session_prefix: str | None = None,
        num_prev_obs: int = 0,
        num_prev_actions: int = 0,
        get_image: bool = False,
        seed: int | None = None,
        auto_reset: bool = False,
        rng: random.Random | None = None,
        **options: Any,
    ) -> None:
        if get_image:
            raise ValueError("get_image=True needs the original's picture features, which this shop does not have")
        for name, count in (("num_prev_obs", num_prev_obs), ("num_prev_actions", num_prev_actions)):
            if not isinstance(count, int) or count < 0:
                raise ValueError(f"{name} must be a number of pages or actions, 0 or more, got {count!r}")
        self.rng = random.Random(seed) if rng is None else rng
        if server is None:
            shop = ShopOptions(
                num_products=num_products, human_goals=bool(human_goals), show_attrs=bool(show_attrs), **options
            )
            files = None if file_path is None else ProductFiles.beside(file_path, attr_path, human_attr_path)
            catalogue = open_catalogue(shop, files)
            seeding = None if seed is None else GoalSeeding.verl_agent(seed)
            goals = build_goals(
                catalogue, shop.human_goals, seeding=seeding, rng=self.rng, filter_goals=filter_goals, limit=limit_goals
            )
            if seed is None and rng is None:
                self.rng.seed()
            server = ShopServer(catalogue, goals, shop)
        self.server = server
        self.observation_mode = observation_mode
        self.session: Any = session
        self.session_prefix = session_prefix
        self.auto_reset = auto_reset
        self.num_prev_obs = num_prev_obs
        self.num_prev_actions = num_prev_actions
        self.prev_obs: deque[str] = deque(maxlen=max(num_prev_obs, 1))
        self.prev_actions: deque[str] = deque(maxlen=max(num_prev_actions, 1))
        self.instruction_text = ""
        self._shopper = ShopSession(server, mode=observation_mode, rng=self.rng)
        self.reset()

    @property
    def shopper(self) -> ShopSession:
        """The session that is being played."""
        return self._shopper

    @property
    def observation(self) -> str:
        return self._shopper.observation()

    @property
    def state(self) -> dict[str, str]:
        """Url, page and instruction."""
        return {
            "url": self._shopper.url,
            "html": self._shopper.render("html"),
            "instruction_text": self.instruction_text,
        }

    def reset(self, session: Any = None, instruction_text: str | None = None) -> tuple[str, None]:
        """Start an episode; returns the observation and None.

        Args:
            session: an integer is a goal index; any other value, through its text, names a session whose goal is drawn
                once and kept; None draws a new name.
            instruction_text: what ``get_instruction_text`` answers; the page does not change.
        """
        if session is None:
            name = "".join(self.rng.choices(string.ascii_lowercase, k=10))
        else:
            name = str(session)
        self.session = (self.session_prefix or "") + name
        goal = self.server.session_goals.get(self.session)
        if goal is None:
            goal = self._goal_of(session)
            self.server.session_goals.put(self.session, goal)
        observation = self._shopper.reset(goal, session_id=self.session)
        shown = self._shopper.instruction_text
        self.instruction_text = f"Instruction: {shown}" if instruction_text is None else instruction_text
        self.prev_obs.clear()
        self.prev_actions.clear()
        self.prev_obs.append(observation)
        return observation, None

    def _goal_of(self, session: Any) -> int:
        """The goal of a session that has none yet."""
        goals = self.server.goals
        if not self.server.options.original_quirks:
            if isinstance(session, numbers.Integral):
                return self.server.check_goal_index(int(session))
            return goals.pick(self.rng)
        if not isinstance(session, int):
            return goals.pick(self.rng)
        if not -len(goals) <= session < len(goals):
            raise IndexError(f"goal index {session} is outside {-len(goals)} to {len(goals) - 1}")
        return session % len(goals)

    def step(self, action: str) -> tuple[str, float, bool, None]:
        """Do one action; returns state (observation with the history asked for), reward, done and None."""
        reward, done, _ = self._shopper.act(action)
        observation = self.observation
        self.prev_actions.append(action)
        state = self._with_history(observation)
        self.prev_obs.append(observation)
        if done and self.auto_reset:
            self.reset()
        return state, reward, done, None

    def _with_history(self, observation: str) -> str:
        parts = [observation]
        for back in range(1, max(self.num_prev_obs, self.num_prev_actions) + 1):
            if back <= min(self.num_prev_actions, len(self.prev_actions)):
                parts.append(self.prev_actions[-back])
            if back <= min(self.num_prev_obs, len(self.prev_obs)):
                parts.append(self.prev_obs[-back])
        return SEPARATOR.join(reversed(parts))

    def get_available_actions(self) -> dict[str, Any]:
        """``has_search_bar`` and the list ``clickables``."""
        return self._shopper.available_actions()

    def get_instruction_text(self) -> str:
        return self.instruction_text

    def render(self, mode: str = "human") -> str:
        """The page as text."""
        return self._shopper.render("text_rich" if mode == "human" else "text")

    def close(self) -> None:
        """Nothing to release: files are shared by the process and unmapped with it."""
