"""A shop of three pages and its troubles; apart from the rest of the support, because host processes import it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from agent_system.environments.env_package.webshop.envs import WebshopSession


class ToyShop:
    """A shop session of three pages. Item ``x`` is what goal g wants when g is even, ``y`` when it is odd."""

    def __init__(self, delay_s: Callable[[int, int], float] | None = None) -> None:
        self._delay_s = delay_s

    def reset(self, goal: int) -> str:
        self._goal, self._page, self._steps = goal, "search", 0
        return f"WebShop [SEP] Instruction: [SEP] want {goal} [SEP] Search"

    def step(self, action: str) -> tuple[str, float, bool, None]:
        self._steps += 1
        if self._delay_s is not None:
            time.sleep(self._delay_s(self._goal, self._steps))
        if action.startswith("search[") and len(action) > 8:
            self._page = "results"
        elif self._page == "results" and action in ("click[x]", "click[y]"):
            self._page = action[6:-1]
        elif self._page in ("x", "y") and action == "click[buy now]":
            return "Thank you", 1.0 if (self._page == "x") == (self._goal % 2 == 0) else 0.5, True, None
        elif action == "crash":
            raise OSError("the shop is on fire")
        elif action == "die":
            os._exit(1)
        elif action == "hang":
            time.sleep(60)
        return f"Instruction: [SEP] want {self._goal} [SEP] Back to Search [SEP] page {self._page}", 0.0, False, None

    def available_actions(self) -> dict[str, Any]:
        clickables = {"search": ["search"], "results": ["back to search", "x", "y"]}
        return {
            "has_search_bar": self._page == "search",
            "clickables": clickables.get(self._page, ["back to search", "buy now"]),
        }


def toy_sessions(delay_s: Callable[[int, int], float] | None = None) -> Callable[[], WebshopSession]:
    return lambda: WebshopSession(lambda seed: ToyShop(delay_s))


def slow_for_some() -> Callable[[], WebshopSession]:
    return toy_sessions(lambda goal, step: 0.03 * ((goal + step) % 3))


class OnceBroken(ToyShop):
    """Fails the first time that its process acts for a goal, then never again."""

    failed: ClassVar[set[int]] = set()

    def step(self, action: str) -> tuple[str, float, bool, None]:
        if self._goal not in self.failed:
            self.failed.add(self._goal)
            raise ConnectionError("a passing trouble")
        return super().step(action)


def once_broken_sessions() -> Callable[[], WebshopSession]:
    return lambda: WebshopSession(lambda seed: OnceBroken())


class Deaf:
    """A session whose steps take too long."""

    def reset(self, task: Any) -> Mapping[str, Any]:
        return {"observation": task}

    def step(self, action: str) -> Mapping[str, Any]:
        time.sleep(600)
        return {}


def deaf_sessions() -> type[Deaf]:
    return Deaf


def misconfigured_sessions() -> Callable[[], Any]:
    raise ValueError("env.webshop.data_dir=/nowhere has no items_shuffle.json")
