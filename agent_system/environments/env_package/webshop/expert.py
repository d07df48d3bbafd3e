"""A scripted shopper that reads what an agent reads and answers as an agent answers.

It sees the text of a page and the actions possible there, nothing else: no goal record, no catalogue. From the task it
takes the words to look for, the options and the price cap; it searches, picks the product whose title covers the words
within the price, chooses the options and buys, and goes back when a product does not offer what is wanted.

Its slips are drawn once per episode from its own generator (:class:`ExpertSkill`). Demonstrations written at an
imperfect skill teach a model to shop well sometimes; reinforcement learning then finds out which habits pay.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["ExpertSkill", "PageView", "Result", "ScriptedExpert", "Wish", "read_page", "read_task"]

SEPARATOR = " [SEP] "
# Products looked at in vain, and steps taken, before the shopper settles for the best one left.
_MOST_REJECTED = 4
_MOST_STEPS_OF_DOUBT = 9

_CAP = re.compile(r",? and price lower than ([\d.]+) dollars\s*$")
_NAMED_OPTIONS = re.compile(r" with (?=[^:,]+: )")
_PRICE = re.compile(r"\$([\d.]+)")
_BY_BRAND = re.compile(r" by (\w+)")
_WORD = re.compile(r"[^\W_]+(?:['.-][^\W_]+)*")
_LEAD_INS = re.compile(
    r"^(?:please |can you |could you |my old one broke, so |help me )*"
    r"(?:i(?:'m| am) looking for|i would like|i want to buy|i want|i need|find me|find|show me|get me|looking for|buy)?"
    r"\b\s*(?:an? )?(?=\S)",
    re.IGNORECASE,
)
_FILLER_TEXT = (
    "a an the i im i'm am is are be it its that which has have and or with in of for to on by me my you can could "
    "would like want need find show get buy help please looking some one so old broke should must also"
)
_FILLERS = frozenset(_FILLER_TEXT.split())


@dataclass(frozen=True)
class ExpertSkill:
    """How often an episode is played with each slip; all zero is the best the script can do.

    Attributes:
        skip_options: buys with none or only some of the options chosen.
        wrong_product: takes another product of the page than the best one.
        lazy_query: searches with the last words of the wish only.
        ignore_price: does not look at the price.
        skip_checks: buys where a look at the features, or going back, would have been wise.
        wander: opens the description of the first product for nothing.
    """

    skip_options: float = 0.0
    wrong_product: float = 0.0
    lazy_query: float = 0.0
    ignore_price: float = 0.0
    skip_checks: float = 0.0
    wander: float = 0.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"expert skill '{item.name}' is a probability between 0 and 1, got {value}")


@dataclass(frozen=True)
class Wish:
    """What a task asks for, as far as its text tells.

    ``text`` is the wish without polite beginnings, ``words`` its telling words in order, ``options`` the options that
    the task names with their group, ``cap`` the price in dollars that must not be passed (infinite without one).
    """

    text: str
    words: tuple[str, ...]
    options: dict[str, str]
    cap: float
    full_text: str


@dataclass(frozen=True)
class Result:
    """One line of a result page; ``low`` and ``high`` are its price bounds in dollars."""

    asin: str
    title: str
    low: float
    high: float


@dataclass(frozen=True)
class PageView:
    """A page as read from its text: ``name`` is search, results, item, sub or done."""

    name: str
    task: str = ""
    results: tuple[Result, ...] = ()
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    title: str = ""
    body: str = ""
    clickables: tuple[str, ...] = ()


def read_task(task: str) -> Wish:
    """Take a task apart: telling words, named options, price cap."""
    cap_match = _CAP.search(task)
    cap = float(cap_match.group(1)) if cap_match else float("inf")
    text = task[: cap_match.start()] if cap_match else task
    full_text = text.lower()
    options: dict[str, str] = {}
    named = _NAMED_OPTIONS.search(text)
    if named:
        for pair in text[named.end() :].split(", and "):
            group, _, value = pair.partition(": ")
            options[group.strip().lower()] = value.strip().lower()
        text = text[: named.start()]
    text = _LEAD_INS.sub("", text.strip().lower(), count=1).strip(" .")
    words = tuple(dict.fromkeys(word for word in _WORD.findall(text) if word not in _FILLERS))
    return Wish(text=text, words=words, options=options, cap=cap, full_text=full_text)


def read_page(page: str, available: Mapping[str, Any]) -> PageView:
    """Read a page in ``text`` mode.

    Args:
        page: the text of the page, its parts joined by " [SEP] ".
        available: ``{"has_search_bar": bool, "clickables": [str]}``.
    """
    parts = page.split(SEPARATOR)
    clickables = tuple(available["clickables"])
    if available["has_search_bar"]:
        return PageView("search", task=parts[2] if len(parts) > 2 else "", clickables=clickables)
    if not clickables:
        return PageView("done")
    task = parts[1] if len(parts) > 1 else ""
    if "buy now" in clickables:
        options, title = _read_options(parts, clickables)
        return PageView("item", task=task, options=options, title=title, clickables=clickables)
    if "next >" in clickables:
        return PageView("results", task=task, results=_read_results(parts), clickables=clickables)
    return PageView("sub", task=task, body=" ".join(parts[4:]).lower(), clickables=clickables)


def _read_results(parts: Sequence[str]) -> tuple[Result, ...]:
    start = parts.index("Next >") + 1 if "Next >" in parts else len(parts)
    results = []
    for asin, title, price in zip(parts[start::3], parts[start + 1 :: 3], parts[start + 2 :: 3], strict=False):
        bounds = [float(text) for text in _PRICE.findall(price)] or [float("inf")]
        results.append(Result(asin, title, min(bounds), max(bounds)))
    return tuple(results)


def _read_options(parts: Sequence[str], clickables: Sequence[str]) -> tuple[dict[str, tuple[str, ...]], str]:
    """Option groups and the title of an item page: what stands between "< Prev" and the price."""
    first = parts.index("< Prev") + 1 if "< Prev" in parts else 0
    last = next((i for i, part in enumerate(parts) if i > first and part.startswith("Price:")), len(parts))
    values = set(clickables[clickables.index("buy now") + 1 :])
    options: dict[str, tuple[str, ...]] = {}
    group = ""
    for part in parts[first : last - 1]:
        if part.lower() in values and group:
            options[group] += (part.lower(),)
        else:
            group = part.lower().strip()
            options[group] = ()
    return options, parts[last - 1] if last - 1 >= first else ""


def _words_of(text: str) -> set[str]:
    return set(_WORD.findall(text.lower()))


def _short_name(title: str) -> str:
    """The brand where the title tells it ("Hoodie by Norvale, ..."), else the first word, which mostly is the brand."""
    by_brand = _BY_BRAND.search(title)
    first = by_brand.group(1) if by_brand else title.split(" ", 1)[0]
    return first.strip(",")


def _respond(thought: str, action: str) -> str:
    return f"<think>{thought}</think><action>{action}</action>"


class ScriptedExpert:
    """Plays one episode after another; a start page begins a new one.

    Args:
        seed: seeds the slips of all episodes.
        skill: how often it slips.
    """

    def __init__(self, seed: int, skill: ExpertSkill | None = None) -> None:
        self._rng = random.Random(f"expert/{seed}")
        self._skill = skill or ExpertSkill()
        self._begin("")

    def act(self, page: str, available: Mapping[str, Any]) -> str:
        """The whole response to a page: a short thought and one action that is possible on it.

        Raises:
            ValueError: the page is the last one of an episode; there is nothing left to do.
        """
        view = read_page(page, available)
        self._steps += 1
        if view.name == "search":
            if view.task != self._task or self._searched:
                self._begin(view.task)
            return self._search()
        if view.name == "results":
            return self._choose_product(view)
        if view.name == "item":
            return self._use_item(view)
        if view.name == "sub":
            return self._read_features(view)
        raise ValueError("the episode is over: its last page offers no action")

    def _begin(self, task: str) -> None:
        """A new episode: read the task and draw the slips."""
        skill, draw = self._skill, self._rng.random
        self._task = task
        self._wish = read_task(task)
        self._searched = False
        self._skips_options = draw() < skill.skip_options
        self._takes_wrong = draw() < skill.wrong_product
        self._is_lazy = draw() < skill.lazy_query
        self._ignores_price = draw() < skill.ignore_price
        self._skips_checks = draw() < skill.skip_checks
        self._wanders = draw() < skill.wander
        self._rejected: dict[str, str] = {}
        self._steps = 1
        self._turned_pages = 0
        self._current: Result | None = None
        self._missing: set[str] = set()
        self._checked_features = False
        self._chosen: list[str] = []
        self._to_skip: int | None = None
        self._wandered = self._came_back = False

    # --- search page -------------------------------------------------------------------------------------------

    def _search(self) -> str:
        self._searched = True
        words = self._wish.words
        thought = "search for the product and what it must have"
        if self._is_lazy:
            words = words[-2:]
            thought = "search for this sort of product"
        query = " ".join(words) or self._wish.text or "product"
        return _respond(thought, f"search[{query}]")

    # --- result page -------------------------------------------------------------------------------------------

    def _choose_product(self, view: PageView) -> str:
        self._checked_features = False
        self._chosen = []
        ranked = sorted(
            (result for result in view.results if result.asin not in self._rejected), key=self._rank_of(view.results)
        )
        affordable = [result for result in ranked if self._is_affordable(result)]
        if not affordable and self._turned_pages < 2 and view.results:
            self._turned_pages += 1
            return _respond(f"nothing here fits below {self._cap_text()}, look further", "click[next >]")
        if not ranked:
            return self._start_over()
        pick = self._rng.choice(ranked[1:4] or ranked) if self._takes_wrong else (affordable or ranked)[0]
        self._current = pick
        self._missing = set(self._wish.words) - _words_of(pick.title)
        return _respond(self._praise(pick), f"click[{pick.asin.lower()}]")

    def _start_over(self) -> str:
        """No product left to look at: forget the rejections and search with fewer words."""
        self._rejected.clear()
        self._is_lazy = True
        self._searched = False
        return _respond("none of these fits, search again with fewer words", "click[back to search]")

    def _rank_of(self, results: Sequence[Result]) -> Any:
        """Sort key: words missing from the title, then how surely the price fits, then the order on the page."""
        order = {result.asin: position for position, result in enumerate(results)}
        words = set(self._wish.words)

        def key(result: Result) -> tuple[int, bool, int]:
            unsure = not self._ignores_price and result.high > self._wish.cap
            return len(words - _words_of(result.title)), unsure, order[result.asin]

        return key

    def _is_affordable(self, result: Result) -> bool:
        return self._ignores_price or result.low <= self._wish.cap

    def _cap_text(self) -> str:
        return f"{self._wish.cap:g}"

    def _praise(self, pick: Result) -> str:
        name = _short_name(pick.title)
        if self._takes_wrong:
            return f"{name} looks good"
        if self._wish.cap == float("inf") or self._ignores_price:
            return f"want {self._wish.text}: {name}"
        return f"want {self._wish.text} below {self._cap_text()}: {name}"

    # --- item page ---------------------------------------------------------------------------------------------

    def _use_item(self, view: PageView) -> str:
        wanted, absent = self._wanted_options(view)
        if self._wanders and not self._wandered:
            self._wandered = True
            return _respond("read the description first", "click[description]")
        objection = self._object(view, absent)
        if objection:
            return objection
        if self._to_skip is None:
            self._to_skip = self._rng.randint(1, max(len(wanted), 1)) if self._skips_options else 0
        left = [pair for pair in wanted if pair[1] not in self._chosen]
        if len(left) > self._to_skip:
            group, value = left[0]
            thought = f"choose {group} {value}"
            if self._chosen:
                thought = f"{self._chosen[-1]} is chosen, now {group} {value}"
            elif len(left) > 1:
                thought += f", then {left[1][0]} {left[1][1]}"
            self._chosen.append(value)
            return _respond(thought, f"click[{value}]")
        if left or (absent and self._skips_checks):
            return _respond("this looks good enough, buy now", "click[buy now]")
        thought = "all options are chosen, buy now" if wanted else "no option to choose, buy now"
        return _respond(thought, "click[buy now]")

    def _object(self, view: PageView, absent: str) -> str:
        """The response when this product is in doubt: a look at its features, or the way back; else nothing."""
        careless = self._skips_checks or self._takes_wrong
        weary = len(self._rejected) >= _MOST_REJECTED or self._steps > _MOST_STEPS_OF_DOUBT
        if self._current is None or careless or self._chosen or weary:
            return ""
        if absent:
            return self._reject(f"{absent} is not offered here, go back")
        self._missing -= _words_of(" ".join([*view.options, *self._all_values(view)]))
        if not self._missing:
            return ""
        if self._checked_features:
            return self._reject(f"{self._missing_text()} is missing, go back")
        return _respond(f"check the features for {self._missing_text()}", "click[features]")

    @staticmethod
    def _all_values(view: PageView) -> list[str]:
        return [value for values in view.options.values() for value in values]

    def _wanted_options(self, view: PageView) -> tuple[list[tuple[str, str]], str]:
        """The (group, value) pairs to choose here, and the first wish that this product does not offer, if any."""
        wanted: list[tuple[str, str]] = []
        absent = ""
        if self._wish.options:
            for group, value in self._wish.options.items():
                if value in view.options.get(group, ()):
                    wanted.append((group, value))
                elif not absent:
                    absent = f"{group} {value}"
            return wanted, absent
        for group, values in view.options.items():
            spoken = [value for value in values if re.search(rf"(?<!\w){re.escape(value)}(?!\w)", self._wish.full_text)]
            if spoken:
                wanted.append((group, max(spoken, key=len)))
        return wanted, absent

    def _missing_text(self) -> str:
        return " ".join(word for word in self._wish.words if word in self._missing)

    def _reject(self, thought: str) -> str:
        assert self._current is not None
        self._rejected[self._current.asin] = thought
        self._current = None
        return _respond(thought, "click[< prev]")

    # --- sub-page ----------------------------------------------------------------------------------------------

    def _read_features(self, view: PageView) -> str:
        if self._wandered and not self._came_back:
            self._came_back = True
            return _respond("nothing new here, go back to the product", "click[< prev]")
        self._checked_features = True
        self._missing -= _words_of(view.body)
        if self._missing:
            return _respond(f"{self._missing_text()} is not listed, go back", "click[< prev]")
        return _respond("it is listed, go back to the product", "click[< prev]")
