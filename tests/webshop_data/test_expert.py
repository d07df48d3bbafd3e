"""The scripted shopper: what it reads from a page, and what it does there."""

from __future__ import annotations

import pytest

from agent_system.environments.env_package.webshop.expert import (
    ExpertSkill,
    ScriptedExpert,
    read_page,
    read_task,
)
from agent_system.environments.env_package.webshop.projection import is_admissible, project_action

TASK = "Find me metal legs, tall bar stool with color: red, and size: tall, and price lower than 40.00 dollars"
HEAD = ["Instruction:", TASK, "Back to Search"]
SEARCH = {"has_search_bar": True, "clickables": ["search"]}


def page(*parts: str) -> str:
    return " [SEP] ".join([*HEAD, *parts])


def results(*lines: tuple[str, str, str]) -> tuple[str, dict[str, object]]:
    parts = [text for line in lines for text in line]
    clickables = ["back to search", "next >", *(line[0].lower() for line in lines)]
    return page("Page 1 (Total results: 2)", "Next >", *parts), {"has_search_bar": False, "clickables": clickables}


def item(title: str, options: dict[str, list[str]]) -> tuple[str, dict[str, object]]:
    shown = [text for group, values in options.items() for text in (group, *values)]
    buttons = ["back to search", "< prev", "description", "features", "reviews", "buy now"]
    clickables = [*buttons, *(value for values in options.values() for value in values)]
    text = page("< Prev", *shown, title, "Price: $23.99", "Rating: N.A.", "Description", "Features", "Reviews", "Buy Now")
    return text, {"has_search_bar": False, "clickables": clickables}


def start(expert: ScriptedExpert, task: str = TASK) -> str:
    return action_of(expert.act(f"WebShop [SEP] Instruction: [SEP] {task} [SEP] Search", SEARCH))


def action_of(response: str) -> str:
    action, valid = project_action(response)
    assert valid
    return action


@pytest.mark.parametrize(
    ("task", "words", "options", "cap"),
    [
        (TASK, "metal legs tall bar stool", {"color": "red", "size": "tall"}, 40.0),
        ("I need soft cotton hoodie, and price lower than 30.00 dollars", "soft cotton hoodie", {}, 30.0),
        ("i would like non slip yoga mat in red, please", "non slip yoga mat red", {}, float("inf")),
        ("Show me easy to clean toaster with style: a, b: c", "easy clean toaster", {"style": "a, b: c"}, float("inf")),
        ("", "", {}, float("inf")),
    ],
)
def test_a_task_is_taken_apart(task: str, words: str, options: dict[str, str], cap: float) -> None:
    wish = read_task(task)
    assert (" ".join(wish.words), wish.options, wish.cap) == (words, options, cap)


def test_pages_are_read_from_their_text() -> None:
    text, available = results(("B0A", "Metal Legs, Bar Stool", "$5.0 to $7.5"), ("B0B", "Desk", "$100.0"))
    view = read_page(text, available)
    assert [(r.asin, r.title, r.low, r.high) for r in view.results] == [
        ("B0A", "Metal Legs, Bar Stool", 5.0, 7.5),
        ("B0B", "Desk", 100.0, 100.0),
    ]
    view = read_page(*item("Bar Stool", {"color": ["red", "blue"], "size": ["tall"]}))
    assert (view.name, view.options, view.title) == ("item", {"color": ("red", "blue"), "size": ("tall",)}, "Bar Stool")
    assert read_page(*item("Bar Stool", {})).options == {}
    sub = read_page(page("< Prev", "Metal legs", "Nice"), {"has_search_bar": False, "clickables": ["back to search", "< prev"]})
    assert (sub.name, sub.body) == ("sub", "metal legs nice")


def test_a_purchase_with_options_in_order() -> None:
    expert = ScriptedExpert(0)
    assert start(expert) == "search[metal legs tall bar stool]"
    found = results(
        ("B0DEAR", "Norvale Metal Legs Tall Bar Stool", "$90.0"), ("B0GOOD", "Metal Legs Tall Bar Stool", "$23.99")
    )
    assert action_of(expert.act(*found)) == "click[b0good]"
    shelf = item("Metal Legs Tall Bar Stool", {"color": ["red", "blue"], "size": ["short", "tall"]})
    assert [action_of(expert.act(*shelf)) for _ in range(3)] == ["click[red]", "click[tall]", "click[buy now]"]


def test_it_goes_back_when_an_option_is_not_offered() -> None:
    expert = ScriptedExpert(0)
    start(expert)
    found = results(("B0A", "Metal Legs Tall Bar Stool", "$23.99"), ("B0B", "Bar Stool Tall Metal Legs", "$23.99"))
    assert action_of(expert.act(*found)) == "click[b0a]"
    assert action_of(expert.act(*item("x", {"color": ["blue"], "size": ["tall"]}))) == "click[< prev]"
    assert action_of(expert.act(*found)) == "click[b0b]"


def test_it_looks_into_the_features_for_what_the_title_does_not_say() -> None:
    expert = ScriptedExpert(0)
    start(expert)
    found = results(("B0A", "Metal Legs Bar Stool", "$23.99"))
    assert action_of(expert.act(*found)) == "click[b0a]"
    shelf = item("Metal Legs Bar Stool", {"color": ["red"], "size": ["tall"]})
    assert action_of(expert.act(*shelf)) == "click[red]", "'tall' is one of the options, not a missing word"
    expert = ScriptedExpert(0)
    start(expert, TASK.replace("metal legs", "rust proof"))
    expert.act(*found)
    assert action_of(expert.act(*shelf)) == "click[features]"
    sub = {"has_search_bar": False, "clickables": ["back to search", "< prev"]}
    assert action_of(expert.act(page("< Prev", " Rust proof"), sub)) == "click[< prev]"
    assert action_of(expert.act(*shelf)) == "click[red]"


@pytest.mark.parametrize(
    ("slip", "expected"),
    [("skip_options", "click[buy now]"), ("wander", "click[description]"), ("skip_checks", "click[red]")],
)
def test_slips_on_the_product_page(slip: str, expected: str) -> None:
    expert = ScriptedExpert(1, ExpertSkill(**{slip: 1.0}))
    start(expert, TASK.replace(", and size: tall", ""))
    expert.act(*results(("B0A", "Metal Legs Tall Bar Stool", "$23.99")))
    assert action_of(expert.act(*item("Bar Stool", {"color": ["red"]}))) == expected


def test_slips_of_search_and_choice() -> None:
    lazy = ScriptedExpert(0, ExpertSkill(lazy_query=1.0))
    assert start(lazy) == "search[bar stool]"
    lines = (("B0A", "Metal Legs Tall Bar Stool", "$90.0"), ("B0B", "Bar Stool", "$9.0"))
    careless = ScriptedExpert(0, ExpertSkill(ignore_price=1.0))
    start(careless)
    assert action_of(careless.act(*results(*lines))) == "click[b0a]"
    wrong = ScriptedExpert(0, ExpertSkill(wrong_product=1.0))
    start(wrong)
    assert action_of(wrong.act(*results(lines[0], lines[1]))) != "click[b0a]"


def test_every_action_is_possible_on_its_page_even_on_odd_pages() -> None:
    expert = ScriptedExpert(0)
    start(expert)
    for text, available in (results(), results(("B0A", "x", "no price")), item("", {})):
        assert is_admissible(action_of(expert.act(text, available)), available)
    with pytest.raises(ValueError, match="over"):
        expert.act("Thank you", {"has_search_bar": False, "clickables": []})


def test_skills_are_probabilities() -> None:
    with pytest.raises(ValueError, match="skip_options"):
        ExpertSkill(skip_options=1.5)
