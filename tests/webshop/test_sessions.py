"""Sessions: the page rules beyond the recordings, bad input, many sessions, many threads."""

from __future__ import annotations

import gc
import os
import random
import re
import threading
import tracemalloc
from collections.abc import Callable
from html.parser import HTMLParser

import numpy as np
import pytest
from webshop_golden import golden

from agent_system.environments.env_package.webshop.options import ShopOptions
from agent_system.environments.env_package.webshop.session import ShopSession, parse_action
from agent_system.environments.env_package.webshop.shop import ShopServer
from agent_system.environments.env_package.webshop.text_env import WebAgentTextEnv


@pytest.fixture
def shop(golden_shop: Callable) -> ShopServer:
    """The golden shop with our own rules."""
    server, _ = golden_shop("orig_pyseed233_human0")
    return ShopServer(server.catalogue, server.goals, ShopOptions())


def _wander(session: ShopSession, rng: random.Random, steps: int) -> list[tuple]:
    trace: list[tuple] = [(session.reset(rng.randrange(len(session.server.goals))),)]
    for _ in range(steps):
        actions = session.available_actions()
        if not actions["clickables"] or rng.random() < 0.1:
            action = f"search[{rng.choice(['tea', 'red shoes for women', session.goal.query, '<q> green tea'])}]"
        else:
            action = f"click[{rng.choice(actions['clickables'])}]"
        trace.append(session.step(action))
    return trace


@pytest.mark.parametrize("episode", golden("golden_episodes.jsonl"), ids=lambda e: e["id"])
def test_our_rules_differ_only_where_the_original_fails(episode: dict, shop: ShopServer, golden_shop: Callable) -> None:
    """Without ``original_quirks`` every recorded observation is the same, and the recorded errors are answers."""
    recorded, rng = golden_shop(episode["goal_set"])
    server = ShopServer(shop.catalogue, recorded.goals, ShopOptions(show_attrs=episode["show_attrs"]))
    session = ShopSession(server, mode=episode["observation_mode"], rng=rng)
    if episode["events"][0]["type"] != "reset" or episode["env_kwargs"].keys() & {"num_prev_obs", "num_prev_actions"}:
        return
    rng.seed(episode["py_random_seed_before_first_reset"])
    for event in episode["events"]:
        if event["type"] == "reset" and event["session_type"] == "int" and event["session"] >= 0 and "obs" in event:
            assert session.reset(event["session"], session_id=event["session_id"]) == event["obs"]
        elif event["type"] == "step" and "error" in event:
            session.step(event["action"])
        elif event["type"] == "step":
            observation, reward, done, info = session.step(event["action"])
            assert (observation, reward, done) == (event["obs"], event["reward"], event["done"])
            if "goal_index_after_auto_reset" in event:
                assert info["available_actions"] == {"has_search_bar": False, "clickables": []}
                return
            assert info["available_actions"] == event["available_actions"]
        else:
            return


def test_a_purchase(shop: ShopServer) -> None:
    session = ShopSession(shop)
    index = next(i for i, goal in enumerate(shop.goals) if len(goal.goal_options) == 2 and goal.price_upper < 1000)
    session.reset(index)
    goal = session.goal
    session.step(f"search[{goal.name}]")
    session.step(f"click[{goal.asin}]")
    for value in goal.goal_options.values():
        session.step(f"click[{value}]")
    assert session.selected_options == goal.goal_options
    observation, reward, done, info = session.step("click[Buy Now]")
    assert (reward, done) == (1.0, True)
    assert info["reward_parts"]["r_option"] == 1.0
    assert info["available_actions"] == {"has_search_bar": False, "clickables": []}
    assert "[SEP] 1.0 [SEP]" in observation
    assert session.step("click[buy now]")[1:3] == (0, False), "nothing is left to click"


def test_goal_index_outside(shop: ShopServer) -> None:
    session = ShopSession(shop)
    for index in (-1, len(shop.goals), 10**9):
        with pytest.raises(ValueError, match=f"outside 0 to {len(shop.goals) - 1}"):
            session.reset(index)
    assert session.reset(np.int64(3)) == session.reset(3)
    env = WebAgentTextEnv("text", server=shop)
    assert env.reset(np.int64(7))[0] == env.reset(7)[0] == session.reset(7)
    with pytest.raises(ValueError, match="observation mode"):
        ShopSession(shop, mode="picture")


@pytest.mark.parametrize("index", ["3", "", 2.0, [1], object()])
def test_goal_index_that_is_no_integer(index: object, shop: ShopServer) -> None:
    session = ShopSession(shop)
    with pytest.raises(ValueError, match=f"an integer from 0 to {len(shop.goals) - 1}, got"):
        session.reset(index)  # type: ignore[arg-type]
    assert session.reset(3).startswith("WebShop"), "the session can still be used"


@pytest.mark.parametrize("action", [None, 5, b"search[tea]", ["search[tea]"]])
def test_action_that_is_no_text(action: object, shop: ShopServer) -> None:
    session, env = ShopSession(shop), WebAgentTextEnv("text", server=shop)
    first = session.reset(0)
    env.reset(0)
    for step in (session.step, env.step):
        with pytest.raises(ValueError, match="an action is a text such as 'search"):
            step(action)  # type: ignore[arg-type]
    assert session.observation() == env.observation == first


def test_step_without_an_episode(shop: ShopServer) -> None:
    session = ShopSession(shop)
    with pytest.raises(ValueError, match="call reset before step"):
        session.step("search[tea]")
    session.reset(0)
    session.close()
    with pytest.raises(ValueError, match="call reset before step"):
        session.step("search[tea]")


@pytest.mark.parametrize("arguments", [{"num_prev_obs": -1}, {"num_prev_actions": "3"}, {"observation_mode": None}])
def test_arguments_of_the_text_environment(arguments: dict, shop: ShopServer) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments)).replace("_", "[_ ]")):
        WebAgentTextEnv(server=shop, **arguments)


@pytest.mark.parametrize(
    "action",
    [
        "", "search", "search[", "search[]", "search[shoes", "click[", "click[]", "click[nothing like it]", "buy now",
        " search[tea]", "Search[tea]", "click[search]", "think[x]", "search]tea[", "\n", "[" * 50_000, "x[" * 50_000,
        "search\n[tea]", "search[]]][[]",
    ],
    ids=lambda action: repr(action[:20]),
)  # fmt: skip
def test_what_is_no_action_changes_nothing(action: str, shop: ShopServer) -> None:
    session = ShopSession(shop)
    first = session.reset(0)
    observation, reward, done, info = session.step(action)
    assert (observation, reward, done, info["valid"]) == (first, 0, False, False)
    assert type(reward) is int


@pytest.mark.parametrize(
    "query",
    [
        "x" * 100_000, "a b " * 25_000, "shoes[", "]]]]", "' OR '1'='1'; --", "{{ config }}", "${jndi:ldap://x}", "\x00",
        "<script>alert(1)</script>", "<r>", "<a> x", "<c>", "<c> ", "<q>", " ", "\ud800", "w " + " ".join(map(str, range(3000))),
    ],
    ids=lambda query: repr(query[:20]),
)  # fmt: skip
@pytest.mark.parametrize("mode", ["text", "text_rich", "html", "url"])
def test_any_query_is_just_text(query: str, mode: str, shop: ShopServer) -> None:
    session = ShopSession(shop, mode=mode)
    session.reset(0)
    _, reward, done, info = session.step(f"search[{query}]")
    assert (reward, done) == (0.0, False)
    assert info["valid"] and "next >" in info["available_actions"]["clickables"]
    assert session.page.name == "results"


def test_the_original_crashes_there_and_we_do_not(shop: ShopServer) -> None:
    session = ShopSession(shop)
    session.reset(0)
    session.step("search[<q> cell phone cases]")
    assert session.step("click[b0lower001]")[3]["valid"]
    assert session.page.name == "item"
    assert "item_page/0/b0lower001" in session.url


class _VisibleText(HTMLParser):
    """Text of a page's body, and its buttons, links and options."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.marked: list[tuple[str, str]] = []
        self._path: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag not in ("input", "meta"):
            self._path.append(tag)
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        text = self.texts.pop()
        if self._path.pop() in ("button", "a", "label", "span"):
            self.marked.append((tag, text))

    def handle_data(self, data: str) -> None:
        if self.texts:
            self.texts[-1] += data


def test_html_has_the_same_nodes(shop: ShopServer) -> None:
    """Parsed by the standard library, every page of a walk has the nodes of the text modes, all escaped."""
    session = ShopSession(shop, mode="html", rng=random.Random(3))
    tags = {"text": "span", "button": "button", "product link": "a", "option": "label"}
    for seed in range(40):
        rng = random.Random(seed)
        session.reset(rng.randrange(len(shop.goals)))
        for action in ("search[<r>]", f"click[{rng.randrange(10)}]", "features", "description", "attributes"):
            if action.startswith("click["):
                links = session.available_actions()["clickables"][2:]
                action = f"click[{rng.choice(links)}]"
            session.step(action if "[" in action else f"click[{action}]")
            parser = _VisibleText()
            parser.feed(session.render("html"))
            assert parser.marked == [(tags[node.kind.value], node.text) for node in session.page.nodes]
            if "[" not in action:
                session.step("click[< prev]")


def test_text_modes_show_the_same_nodes(shop: ShopServer) -> None:
    session = ShopSession(shop, rng=random.Random(0))
    for _ in range(30):
        _wander(session, session.rng, 10)
        visible = [node.text for node in session.page.nodes if node.text]
        assert session.render("text").split(" [SEP] ") == [text.strip() for text in visible]
        rich = session.render("text_rich")
        position = 0
        for text in visible:
            position = rich.index(text, position) + len(text)


def test_parse_action_is_the_greedy_pattern() -> None:
    """As ``(.+)\\[(.+)\\]`` anchored at the start, without its quadratic time."""
    rng = random.Random(0)
    for _ in range(20_000):
        action = "".join(rng.choices("ab[]\n ", k=rng.randrange(9)))
        found = re.match(r"(.+)\[(.+)\]", action)
        assert parse_action(action) == ((found[1], found[2].lower()) if found else (action, None)), action


def test_parse_action() -> None:
    assert parse_action("search[red [large] shoes]") == ("search[red ", "large] shoes")
    assert parse_action("click[A]]") == ("click", "a]")
    assert parse_action("click[a] and so on") == ("click", "a")
    assert parse_action("nothing") == ("nothing", None)


def test_one_session_does_not_touch_another(shop: ShopServer) -> None:
    """Interleaved sessions see what they would see alone, also when one of them fails."""
    alone = [_wander(ShopSession(shop, rng=random.Random(i)), random.Random(i), 25) for i in range(8)]
    sessions = [ShopSession(shop, rng=random.Random(i)) for i in range(8)]
    broken = ShopSession(shop)
    walks: list[list[tuple]] = [[] for _ in sessions]

    def walk(number: int) -> None:
        walks[number] = _wander(sessions[number], random.Random(number), 25)
        with pytest.raises(ValueError):
            broken.reset(-5)

    threads = [threading.Thread(target=walk, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert walks == alone


def test_ten_thousand_resets_leave_memory_flat(shop: ShopServer) -> None:
    def work(count: int) -> None:
        rng = random.Random(0)
        for number in range(count):
            session = ShopSession(shop, rng=rng)
            session.reset(number % len(shop.goals))
            session.step("search[tea]")
            session.close()
        env = WebAgentTextEnv("text", server=shop, rng=rng)
        for _ in range(count):
            env.reset()

    shop.session_goals._limit = 500
    work(1000)
    gc.collect()  # what earlier tests left open
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    tracemalloc.start()
    work(1000)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    work(9000)
    gc.collect()
    growth = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert growth < 200_000, f"{growth} bytes more after 9,000 episodes"
    assert len(os.listdir("/proc/self/fd")) <= files and threading.active_count() <= threads


def test_session_state_is_small(shop: ShopServer) -> None:
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    sessions = [ShopSession(shop, rng=random.Random(i)) for i in range(256)]
    for number, session in enumerate(sessions):
        session.reset(number)
        session.step("search[tea]")
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert used / len(sessions) < 20_000
