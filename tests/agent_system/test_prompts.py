from __future__ import annotations

import pytest

from agent_system.environments.prompts.webshop import (
    WEBSHOP_TEMPLATE,
    WebshopDialogue,
    build_prompt,
    extract_task,
    format_observation,
    list_admissible_actions,
)

START = "WebShop [SEP] Instruction: [SEP] a red shoe [SEP] Search"
RESULTS = "Instruction: [SEP] a red shoe [SEP] Back to Search [SEP] Page 1 (Total results: 0) [SEP] Next >"
SEARCH_BAR = {"has_search_bar": True, "clickables": ["search"]}
LINKS = {"has_search_bar": False, "clickables": ["back to search", "next >"]}


def test_the_task_is_the_field_after_instruction():
    assert extract_task(START) == "a red shoe"
    with pytest.raises(ValueError, match="after 'Instruction:'"):
        extract_task("Thank you [SEP] for [SEP] shopping")


def test_pages_show_what_follows_the_task_in_quotes():
    assert (
        format_observation(RESULTS, "a red shoe") == "'Back to Search' [SEP] 'Page 1 (Total results: 0)' [SEP] 'Next >'"
    )
    assert format_observation("Thank you [SEP] done", "a red shoe") == "Thank you [SEP] done"


def test_the_inert_search_button_is_not_offered():
    assert list_admissible_actions(SEARCH_BAR) == ["search[<your query>]"]
    assert list_admissible_actions(LINKS) == ["click[back to search]", "click[next >]"]
    with pytest.raises(ValueError, match="scroll"):
        list_admissible_actions(LINKS | {"scroll": True})


def test_the_words_around_the_slots_are_few():
    assert len(WEBSHOP_TEMPLATE.split()) <= 60


def test_a_dialogue_shows_task_page_actions_and_recent_steps():
    dialogue = WebshopDialogue(history_length=2)
    first = dialogue.start(START, SEARCH_BAR)
    assert "a red shoe" in first
    assert "'search[<your query>]'," in first
    assert "Action 1" not in first
    second = dialogue.advance("search[red]", RESULTS, LINKS)
    assert "[Observation 1: ''Search'', Action 1: 'search[red]']" in second
    assert "'click[next >]'," in second
    dialogue.advance("click[next >]", RESULTS, LINKS)
    fourth = dialogue.advance("click[next >]", RESULTS, LINKS)
    assert "Steps taken: 3. The last 2:" in fourth
    assert "Action 1:" not in fourth
    assert "Action 3:" in fourth


def test_a_shorter_prompt_shows_fewer_steps():
    dialogue = WebshopDialogue(history_length=2)
    dialogue.start(START, SEARCH_BAR)
    dialogue.advance("search[red]", RESULTS, LINKS)
    dialogue.advance("click[next >]", RESULTS, LINKS)
    assert "Action 1:" not in dialogue.prompt(1)
    assert "Action 2:" in dialogue.prompt(1)
    assert dialogue.prompt(0) == build_prompt("a red shoe", dialogue.observation, dialogue.admissible_actions)
    assert dialogue.prompt(9) == dialogue.prompt()


def test_no_history_is_shown_when_none_is_wanted():
    dialogue = WebshopDialogue(history_length=0)
    dialogue.start(START, SEARCH_BAR)
    assert "Action 1:" not in dialogue.advance("search[red]", RESULTS, LINKS)


def test_a_prompt_of_more_than_13000_characters_drops_its_history():
    kwargs = {"history_count": 1, "step_count": 1}
    short = build_prompt("task", "page", ["click[a]"], history="h" * 12_000, **kwargs)
    assert "h" * 12_000 in short
    assert len(short) <= 13_000
    long = build_prompt("task", "page", ["click[a]"], history="h" * 13_000, **kwargs)
    assert long == build_prompt("task", "page", ["click[a]"])
