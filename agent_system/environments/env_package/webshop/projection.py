"""From a model's text to a WebShop action: the format rule and the page rule.

Two separate judgements, each with its own metric. *Valid* is about form: reasoning tags, an action tag, no Chinese
characters. *Admissible* is about the page: the action is a search where there is a search bar, or a click on something
that can be clicked. A text that breaks the form yields its last characters as the action, which no page knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_FALLBACK_CHARACTERS = 20
_LONGEST_ACTION = 2_000
_CHINESE = re.compile("[\u4e00-\u9fff]")
_CALL = re.compile(r"(.+)\[(.+)\]")


def project_action(text: str) -> tuple[str, bool]:
    """The action in one model output and whether the output has the required form.

    The action is the lower-cased, stripped text between the first ``<action>`` and the first ``</action>``; without
    both tags it is the last 20 characters. The form asks for both action tags in any case, literal ``<think>`` and
    ``</think>`` and no character from U+4E00 to U+9FFF. An empty action has the right form, as in the original rule. An
    action of more than 2,000 characters is no action but text that went astray: it counts as missing.
    """
    lowered = text.lower()
    start, end = lowered.find("<action>"), lowered.find("</action>")
    action = lowered[start + len("<action>") : end].strip()
    if start < 0 or end < 0 or len(action) > _LONGEST_ACTION:
        return lowered[-_FALLBACK_CHARACTERS:], False
    valid = "<think>" in text and "</think>" in text and _CHINESE.search(text) is None
    return action, valid


def webshop_projection(actions: list[str]) -> tuple[list[str], list[int]]:
    """Parses a batch of model outputs.

    Args:
        actions: the decoded responses; the list is left as it is.

    Returns:
        The actions for the shop and, for each, 1 where the output has the required form and 0 where it has not.
    """
    parsed = [project_action(text) for text in actions]
    return [action for action, _ in parsed], [int(valid) for _, valid in parsed]


def is_admissible(action: str, available: Mapping[str, Any]) -> bool:
    """Whether ``action`` does something on a page with these available actions.

    Parsing is the shop's own (greedy, anchored at the start only), so what is admissible here is what the shop acts
    on, with one exception: the shop also takes a search where no search bar is shown, which is not admissible.
    """
    match = _CALL.match(action)
    if match is None:
        return False
    name, argument = match.group(1), match.group(2).lower()
    if name == "search":
        return bool(available.get("has_search_bar"))
    clickables: Sequence[str] = available.get("clickables", ())
    return name == "click" and argument != "search" and argument in clickables
