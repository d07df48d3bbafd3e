"""Whole episodes against recordings: every observation, url, action list and reward."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from webshop_golden import golden

from agent_system.environments.env_package.webshop.search import TooManyTermsError
from agent_system.environments.env_package.webshop.text_env import WebAgentTextEnv

ERRORS = {"KeyError": KeyError, "IndexError": IndexError, "TypeError": TypeError}


def _session(event: dict) -> object:
    """The argument of ``reset`` with its recorded type."""
    value, kind = event["session"], event["session_type"]
    return {"int64": np.int64, "int32": np.int32, "float": float, "bool": bool}.get(kind, lambda v: v)(value)


def _expect_error(event: dict, call: Callable[[], object]) -> None:
    with pytest.raises(ERRORS.get(event["error"].split(":")[0], TooManyTermsError)):
        call()


@pytest.mark.golden("golden_episodes.jsonl")
@pytest.mark.parametrize("episode", golden("golden_episodes.jsonl"), ids=lambda e: f"{e['id']} {e['name'][:40]}")
def test_episode(episode: dict, golden_shop: Callable) -> None:
    server, rng = golden_shop(episode["goal_set"], show_attrs=episode["show_attrs"])
    env = WebAgentTextEnv(
        episode["observation_mode"], server=server, rng=rng, auto_reset=episode["impl"] == "va", **episode["env_kwargs"]
    )
    rng.seed(episode["py_random_seed_before_first_reset"])
    for event in episode["events"]:
        if event["type"] == "set":
            assert event["what"] == "server.assigned_instruction_text"
            server.assigned_instruction_text = event["value"]
        elif event["type"] == "reset":
            _check_reset(env, event)
        else:
            _check_step(env, event)


def _check_reset(env: WebAgentTextEnv, event: dict) -> None:
    if "error" in event:
        _expect_error(event, lambda: env.reset(_session(event), **event["kwargs"]))
        return
    observation, info = env.reset(_session(event), **event["kwargs"])
    assert observation == event["obs"]
    assert info == event["info"]
    assert env.get_available_actions() == event["available_actions"]
    assert env.state["url"] == event["url"]
    assert env.session == event["session_id"]
    assert env.shopper.goal_index == event["goal_index"]
    assert env.get_instruction_text() == event["instruction_text"]


def _check_step(env: WebAgentTextEnv, event: dict) -> None:
    if "error" in event:
        _expect_error(event, lambda: env.step(event["action"]))
        return
    state, reward, done, info = env.step(event["action"])
    assert state == event["obs"]
    assert reward == event["reward"]
    assert type(reward).__name__ == event["reward_type"]
    assert done == event["done"]
    assert info == event["info"]
    assert env.get_available_actions() == event["available_actions"]
    assert env.state["url"] == event["url"]
    if "goal_index_after_auto_reset" in event:
        assert env.shopper.goal_index == event["goal_index_after_auto_reset"]
        assert env.session == event["session_id_after_auto_reset"]
