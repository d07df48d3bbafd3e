"""Visits: one person's shopping session each, and a bounded store of them."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from agent_system.environments.env_package.webshop.pages import Kind
from agent_system.environments.env_package.webshop.records import Product
from agent_system.environments.env_package.webshop.session import ShopServer, ShopSession, parse_action

__all__ = ["Visit", "VisitStore"]

MAX_VISITS = 1000
MAX_ACTIONS = 200  # of a visit that are remembered
MAX_ACTION_LENGTH = 400  # characters of an action that are remembered


@dataclass
class Visit:
    """One session with the latest actions taken in it. ``lock`` is held while one acts or reads."""

    token: str
    session: ShopSession
    actions: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    steps: int = 0
    asin: str = ""  # of the product that was opened last

    def act(self, action: str) -> bool:
        """Do one action of the agent's language; returns whether it did something."""
        name, argument = parse_action(action)
        node = self.session.page.clickables().get(argument or "") if name == "click" else None
        _, _, valid = self.session.act(action)
        if valid:
            self.steps += 1
            self.actions.append(action[:MAX_ACTION_LENGTH])
            del self.actions[:-MAX_ACTIONS]
            if node is not None and node.kind is Kind.LINK:
                self.asin = node.text
        return valid

    @property
    def product(self) -> Product | None:
        """The product that was opened last."""
        catalogue = self.session.server.catalogue
        row = catalogue.row_of(self.asin)
        return None if row is None else catalogue.product(row)


class VisitStore:
    """The most recent visits by token; the oldest ones go when there are too many."""

    def __init__(self, server: ShopServer, limit: int = MAX_VISITS) -> None:
        self._server = server
        self._limit = limit
        self._visits: OrderedDict[str, Visit] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, goal_index: int | None) -> Visit:
        """A new visit with this goal, or a drawn one.

        Raises:
            ValueError: there is no such goal; the message gives the valid range.
        """
        session = ShopSession(self._server)
        session.reset(goal_index)
        visit = Visit(secrets.token_urlsafe(12), session)
        with self._lock:
            self._visits[visit.token] = visit
            while len(self._visits) > self._limit:
                self._visits.popitem(last=False)
        return visit

    def get(self, token: str) -> Visit | None:
        with self._lock:
            visit = self._visits.get(token)
            if visit is not None:
                self._visits.move_to_end(token)
            return visit

    def __len__(self) -> int:
        return len(self._visits)
