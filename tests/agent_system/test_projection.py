from __future__ import annotations

import pytest

from agent_system.environments.env_package.webshop.projection import is_admissible, webshop_projection

SEARCH_PAGE = {"has_search_bar": True, "clickables": ["search"]}
ITEM_PAGE = {"has_search_bar": False, "clickables": ["back to search", "buy now", "x[l]", "3.5 in"]}


@pytest.mark.parametrize(
    ("text", "action", "valid"),
    [
        ("<think>a</think><action>Search[Red Shoes]</action>", "search[red shoes]", 1),  # golden
        ("<action>click[a]</action>", "click[a]", 0),  # golden: no think tags
        ("<think>好</think><action>click[a]</action>", "click[a]", 0),  # golden: a Chinese character
        ("<THINK>a</THINK><ACTION>Click[A]</ACTION>", "click[a]", 0),  # golden: upper-case tags
        ("<think>a</think><ACTION> click[a]\n</ACTION>", "click[a]", 1),  # only the think tags are case-sensitive
        ("</think><think><action>click[a]</action>", "click[a]", 1),  # the order of think tags is not looked at
        ("<think>a</think><action>one</action><action>two</action>", "one", 1),
        ("<think></think></action><action>", "", 1),
        ("<think></think><action></action>", "", 1),
        ("<think>a</think> I will BUY this wonderful thing", "buy this wonderful thing"[-20:], 0),
        ("<think>a</think><action>click[a]", "ink><action>click[a]", 0),
        (
            "<think>a</think><action>search[" + "y" * 20_000 + "]</action>",
            "yyyyyyyyy]</action>"[-20:].rjust(20, "y"),
            0,
        ),
        ("", "", 0),
    ],
)
def test_projection(text, action, valid):
    outputs = [text]
    assert webshop_projection(outputs) == ([action], [valid])
    assert outputs == [text]


@pytest.mark.parametrize(
    ("action", "page", "admissible"),
    [
        ("search[red shoes]", SEARCH_PAGE, True),
        ("search[]", SEARCH_PAGE, False),
        ("click[search]", SEARCH_PAGE, False),  # listed by the shop, does nothing
        ("click[buy now]", SEARCH_PAGE, False),
        ("search[red shoes]", ITEM_PAGE, False),
        ("click[buy now]", ITEM_PAGE, True),
        ("click[Buy Now]", ITEM_PAGE, True),
        ("Click[buy now]", ITEM_PAGE, False),
        ("click[buy now] please", ITEM_PAGE, True),  # the shop ignores what follows the bracket
        ("click[3.5 in]", ITEM_PAGE, True),
        ("click[x[l]]", ITEM_PAGE, False),  # greedy: the name would be "click[x"
        ("buy now", ITEM_PAGE, False),
        ("", ITEM_PAGE, False),
        ("z" * 20_000, ITEM_PAGE, False),
    ],
)
def test_admissibility(action, page, admissible):
    assert is_admissible(action, page) is admissible
