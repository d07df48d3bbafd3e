"""Shopping sessions: one shopper's way through the pages.

A session is a few small fields beside what :class:`.shop.ShopServer` shares, so a process can hold thousands.
"""

from __future__ import annotations

import json
import logging
import random
import string
from dataclasses import dataclass, field
from typing import Any

from agent_system.environments.env_package.webshop import pages
from agent_system.environments.env_package.webshop.goals import Goal
from agent_system.environments.env_package.webshop.pages import Kind, Page
from agent_system.environments.env_package.webshop.reward import Reward
from agent_system.environments.env_package.webshop.shop import ShopServer, load_shop

__all__ = ["BASE_URL", "MODES", "ShopServer", "ShopSession", "load_shop", "parse_action"]

logger = logging.getLogger(__name__)

BASE_URL = "http://127.0.0.1:3000"
MODES = ("text", "text_rich", "html", "url")


@dataclass(slots=True)
class _State:
    """Where a shopper is. ``row`` is the product's; ``options`` maps group to value in click order."""

    keywords: list[str] | None = None
    number: int = 1  # page of the results
    row: int | None = None
    options: dict[str, str] = field(default_factory=dict)
    visited: set[str] = field(default_factory=set)


class ShopSession:
    """One shopper.

    ``reset(goal_index)`` gives the first observation, ``step(action)`` gives observation, reward, done and info.
    Actions are ``search[words]`` and ``click[text]``; anything else leaves the page as it is.
    """

    def __init__(self, server: ShopServer, *, mode: str = "text", rng: random.Random | None = None) -> None:
        """``rng`` draws random goals and ``<r>`` searches; None seeds one from the system."""
        if mode not in MODES:
            raise ValueError(f"observation mode must be one of {', '.join(MODES)}, got {mode!r}")
        self.server = server
        self.mode = mode
        self.rng = random.Random() if rng is None else rng
        self.session_id = ""
        self.goal_index = 0
        self.done = False
        self.reward: Reward | None = None  # of the last purchase
        self.url = BASE_URL
        self._instruction = ""
        self._state = _State()
        self._page = Page("none")
        self._clickables: dict[str, pages.Node] = {}
        self._observation: str | None = None

    @property
    def goal(self) -> Goal:
        return self.server.goals[self.goal_index]

    @property
    def page(self) -> Page:
        """The page that is shown."""
        return self._page

    @property
    def instruction_text(self) -> str:
        """The instruction as the page shows it."""
        return self._instruction

    @property
    def selected_options(self) -> dict[str, str]:
        return dict(self._state.options)

    def reset(self, goal_index: int | None = None, *, session_id: str | None = None) -> str:
        """Start an episode; returns the search page.

        Args:
            goal_index: which goal; None draws one by weight.
            session_id: name in the urls; None takes the goal's number, or ten letters.

        Raises:
            ValueError: there is no such goal; the message gives the valid range.
        """
        goals = self.server.goals
        if goal_index is None:
            if session_id is None:
                session_id = "".join(self.rng.choices(string.ascii_lowercase, k=10))
            goal_index = goals.pick(self.rng)
        else:
            goal_index = self.server.check_goal_index(goal_index)
        self.goal_index = goal_index
        self.session_id = str(self.goal_index) if session_id is None else session_id
        if self.server.assigned_instruction_text is not None:
            goals.set_text(self.goal_index, self.server.assigned_instruction_text)
        self._instruction = self.goal.instruction_text
        self.done = False
        self.reward = None
        self._to_search_page()
        return self.observation()

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Do one action.

        Returns:
            observation: the page after it.
            reward: the score of a purchase; 0.0 for other valid actions, the integer 0 when nothing happened.
            done: whether this action bought something.
            info: ``available_actions`` of the page, ``valid`` (whether the action did something), and after a purchase
                ``reward_parts``.

        Raises:
            ValueError: ``action`` is not a text, or there is no episode: ``reset`` starts one.
        """
        reward, done, valid = self.act(action)
        info: dict[str, Any] = {"available_actions": self.available_actions(), "valid": valid}
        if done and self.reward is not None:
            info["reward_parts"] = self.reward.parts()
        return self.observation(), reward, done, info

    def act(self, action: str) -> tuple[float, bool, bool]:
        """As :meth:`step` without rendering: reward, done, and whether the action did something.

        Raises:
            ValueError: ``action`` is not a text, or there is no episode.
        """
        if not isinstance(action, str):
            raise ValueError(f"an action is a text such as 'search[red shoes]', got {action!r}")
        if self._page.name == "none":
            raise ValueError("there is no episode: call reset before step")
        name, argument = parse_action(action)
        if name == "search" and argument:
            self._to_results(argument.split(" "), 1)
            return 0.0, False, True
        if name == "click" and argument is not None and argument in self._clickables and argument != "search":
            return self._click(argument)
        return 0, False, False

    def close(self) -> None:
        """Forget the episode. The session can be reset again."""
        self._state, self._page, self._clickables, self._observation = _State(), Page("none"), {}, None
        self.reward = None

    def available_actions(self) -> dict[str, Any]:
        """``has_search_bar`` and the list ``clickables``."""
        return {"has_search_bar": self._page.has_search_bar, "clickables": list(self._clickables)}

    def observation(self) -> str:
        """The page in the session's mode."""
        if self._observation is None:
            self._observation = self.render(self.mode)
        return self._observation

    def render(self, mode: str) -> str:
        """The page in a mode: ``text``, ``text_rich``, ``html`` or ``url``."""
        if mode == "text":
            return self._page.as_text()
        if mode == "text_rich":
            return self._page.as_rich_text(self.url, self._state.visited)
        if mode == "html":
            return self._page.as_html()
        if mode == "url":
            return self.url
        raise ValueError(f"a page renders as one of {', '.join(MODES)}, not {mode!r}")

    # Page changes. Every url is built as the original's, because it decides below which page one is on.

    def _show(self, page: Page, url: str) -> None:
        self._page = page
        self._clickables = page.clickables()
        self._observation = None
        self.url = url

    def _query_url(self, name: str) -> str:
        state = self._state
        asin = "" if state.row is None else f"{self.server.catalogue.asin(state.row)}/"
        return f"{BASE_URL}/{name}/{self.session_id}/{asin}{'+'.join(state.keywords or [])}/{state.number}"

    def _to_search_page(self) -> None:
        self._state = _State()
        self._show(pages.search_page(self._instruction), f"{BASE_URL}/{self.session_id}")

    def _to_results(self, keywords: list[str], number: int) -> None:
        rows = self.server.search(" ".join(keywords), self.rng)
        state = self._state
        state.keywords, state.number, state.row, state.options = keywords, number, None, {}
        catalogue = self.server.catalogue
        shown = rows[(number - 1) * pages.PAGE_SIZE : number * pages.PAGE_SIZE]
        products = [(catalogue.asin(row), catalogue.title(row), catalogue.price_tag(row)) for row in map(int, shown)]
        page = pages.results_page(self._instruction, number, len(rows), products)
        self._show(page, self._query_url("search_results"))

    def _to_item(self) -> None:
        product = self.server.catalogue.product(self._row())
        url = f"{self._query_url('item_page')}/{json.dumps(self._state.options)}"
        self._show(pages.item_page(self._instruction, product, self.server.options.show_attrs), url)

    def _to_sub_page(self, name: str) -> None:
        product = self.server.catalogue.product(self._row())
        url = f"{self._query_url('item_sub_page')}/{name}/{self._state.options}"
        self._show(pages.sub_page(self._instruction, product, name), url)

    def _buy(self) -> tuple[float, bool, bool]:
        row, options = self._row(), self._state.options
        self.reward = self.server.score(row, options, self.goal_index)
        self.done = True
        asin = self.server.catalogue.asin(row)
        url = f"{BASE_URL}/done/{self.session_id}/{asin}/{options}"
        self._show(pages.done_page(asin, options, self.reward.total), url)
        return self.reward.total, True, True

    def _row(self) -> int:
        assert self._state.row is not None, "a product is open on this page"
        return self._state.row

    def _where(self) -> str:
        """The page one is on, found by name in the url. Words of a query can fool this, as in the original."""
        for name in ("search_results", "item_page", "item_sub_page", "done"):
            if name in self.url:
                return name
        return "index"

    def _click(self, text: str) -> tuple[float, bool, bool]:
        """Act on a click. The text decides, whatever element it is on."""
        state, where = self._state, self._where()
        if text == "buy now":
            return self._buy()
        if text == "back to search":
            self._to_search_page()
        elif text == "next >" and where == "search_results":
            self._to_results(state.keywords or [], state.number + 1)
        elif text == "< prev" and where == "search_results":
            self._to_results(state.keywords or [], state.number - 1)
        elif text == "< prev" and where == "item_sub_page":
            self._to_item()
        elif text == "< prev" and where == "item_page":
            self._to_results(state.keywords or [], state.number)
        elif text in pages.SUB_PAGES:
            self._to_sub_page(pages.SUB_PAGES[text])
        else:
            self._choose(text)
        return 0.0, False, True

    def _choose(self, text: str) -> None:
        """Open a product or select an option."""
        node = self._clickables[text]
        if node.kind is Kind.LINK:
            self._open_product(node.text, text)
        elif node.kind is Kind.OPTION:
            self._state.options[node.group.lower()] = text
            self._to_item()

    def _open_product(self, asin: str, clicked: str) -> None:
        catalogue = self.server.catalogue
        found = clicked.upper() if self.server.options.original_quirks else asin
        row = catalogue.row_of(found)
        if row is None:
            raise KeyError(found)
        self._state.row = row
        self._state.visited.add(found)
        self._to_item()


def parse_action(action: str) -> tuple[str, str | None]:
    """Name and lower-cased argument of ``name[argument]``; other texts are a name without argument.

    The name ends at the last bracket that leaves an argument, which ends at the last closing bracket.

    >>> parse_action("click[Buy Now]"), parse_action("think")
    (('click', 'buy now'), ('think', None))
    """
    line = action.partition("\n")[0]
    end = line.rfind("]")
    start = line.rfind("[", 1, max(end - 1, 1))
    if start < 0:
        return action, None
    return line[:start], line[start + 1 : end].lower()
