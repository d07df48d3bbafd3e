from __future__ import annotations

import pytest

from agent_system.memory import SearchMemory, SimpleMemory


def filled(memory, steps=3):
    memory.reset(batch_size=2)
    for step in range(1, steps + 1):
        memory.store({"text_obs": [f"a{step}", f"b{step}"], "action": [f"x{step}", f"y{step}"]})
    return memory


def test_the_last_two_of_three_steps_are_numbered_from_the_start_of_the_episode():
    texts, counts = filled(SimpleMemory()).fetch(2)
    assert texts[0] == "[Observation 2: 'a2', Action 2: 'x2']\n[Observation 3: 'a3', Action 3: 'x3']"
    assert texts[1] == "[Observation 2: 'b2', Action 2: 'y2']\n[Observation 3: 'b3', Action 3: 'y3']"
    assert counts == [2, 2]


def test_a_history_longer_than_the_episode_shows_all_of_it():
    texts, counts = filled(SimpleMemory(), steps=1).fetch(5)
    assert texts == ["[Observation 1: 'a1', Action 1: 'x1']", "[Observation 1: 'b1', Action 1: 'y1']"]
    assert counts == [1, 1]


def test_length_is_the_batch_and_items_are_the_steps():
    memory = filled(SimpleMemory())
    assert len(memory) == 2
    assert memory[1][0] == {"text_obs": "b1", "action": "y1"}
    memory.reset(batch_size=3)
    assert len(memory) == 3
    assert memory[0] == []


def test_search_memory_puts_a_blank_line_between_steps():
    memory = SearchMemory()
    memory.reset(batch_size=1)
    memory.store({"search": ["<search>q1</search>"], "information": ["found 1"]})
    memory.store({"search": ["<search>q2</search>"], "information": ["found 2"]})
    texts, counts = memory.fetch(2, obs_key="information", action_key="search")
    assert texts == ["Step 1:<search>q1</search> found 1\n\nStep 2:<search>q2</search> found 2\n"]
    assert counts == [2]


def test_a_step_must_bring_the_same_keys_for_every_environment():
    memory = filled(SimpleMemory())
    with pytest.raises(ValueError, match="brings"):
        memory.store({"text_obs": ["a", "b"]})
    with pytest.raises(ValueError, match="2 environments got 1"):
        memory.store({"text_obs": ["a"], "action": ["x", "y"]})
