"""The site: a person's clicks are an agent's actions, everything is escaped, bad requests get an answer."""

from __future__ import annotations

import html
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Chromium, find_chromium
from flask.testing import FlaskClient
from werkzeug.serving import make_server

from agent_system.environments.env_package.webshop import generator
from agent_system.environments.env_package.webshop.expert import ScriptedExpert
from agent_system.environments.env_package.webshop.projection import project_action
from agent_system.environments.env_package.webshop.session import ShopServer, ShopSession, load_shop
from agent_system.environments.env_package.webshop.site import create_app
from agent_system.environments.env_package.webshop.site.__main__ import main as serve
from agent_system.environments.env_package.webshop.site.art import draw
from agent_system.environments.env_package.webshop.site.visits import MAX_ACTION_LENGTH, MAX_ACTIONS, VisitStore

NASTY = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> ShopServer:
    return load_shop({"num_products": 400, "cache_dir": str(tmp_path_factory.mktemp("cache"))})


@pytest.fixture
def client(shop: ShopServer) -> FlaskClient:
    return create_app(shop, seed=0).test_client()


def begin(client: FlaskClient, goal: int | str = 3) -> str:
    answer = client.post("/start", data={"goal": str(goal)})
    assert answer.status_code == 303
    return answer.headers["Location"]


def do(client: FlaskClient, url: str, **form: str) -> str:
    answer = client.post(f"{url}/act", data=form, follow_redirects=True)
    assert answer.status_code == 200
    return answer.get_data(as_text=True)


def expert_actions(shop: ShopServer, goal: int) -> tuple[list[str], float]:
    """A purchase by actions: what was done and the score."""
    session, expert = ShopSession(shop), ScriptedExpert(0)
    page, done, score, actions = session.reset(goal), False, 0.0, []
    while not done:
        action, _ = project_action(expert.act(page, session.available_actions()))
        page, score, done, _ = session.step(action)
        actions.append(action)
    return actions, score


@pytest.mark.parametrize("goal", [3, 11, 50, 222])
def test_a_purchase_by_forms_scores_as_by_actions(shop: ShopServer, client: FlaskClient, goal: int) -> None:
    actions, score = expert_actions(shop, goal)
    url = begin(client, goal)
    page = ""
    for action in actions:
        if action.startswith("search["):
            page = do(client, url, query=action[len("search[") : -1])
        else:
            offered = [html.unescape(value) for value in re.findall(r'name="action" value="([^"]*)"', page)]
            assert action in offered, "the page has a button for every action the agent took"
            page = do(client, url, action=action)
    assert f'data-score="{score}"' in page
    assert page.count('<li class="met">') + page.count('<li class="missed">') == page.count('class="sort"')
    if score == 1.0:
        assert "A perfect purchase" in page and 'class="missed"' not in page


def test_pages_show_what_the_session_shows(shop: ShopServer, client: FlaskClient) -> None:
    url, session = begin(client), ShopSession(shop)
    session.reset(3)
    page = do(client, url, query="soft shirt")
    session.step("search[soft shirt]")
    for text in session.render("text").split(" [SEP] "):
        assert html.escape(text, quote=False) in page or html.escape(text) in page
    asin = session.available_actions()["clickables"][2]
    page = do(client, url, action=f"click[{asin}]")
    session.step(f"click[{asin}]")
    for text in session.available_actions()["clickables"]:
        assert f'value="click[{html.escape(text)}]"' in page
    for name in ("description", "features", "reviews"):
        page = do(client, url, action=f"click[{name}]")
        session.step(f"click[{name}]")
        for text in session.render("text").split(" [SEP] "):
            assert html.escape(text) in page or text in page
        do(client, url, action="click[< prev]")
        session.step("click[< prev]")


def test_chosen_options_are_shown_and_tint_the_picture(shop: ShopServer, client: FlaskClient) -> None:
    goal = next(i for i, goal in enumerate(shop.goals) if "color" in goal.goal_options)
    wanted = shop.goals[goal]
    url = begin(client, goal)
    do(client, url, query=f"<q> {wanted.query}")
    page = do(client, url, query=wanted.name)
    page = do(client, url, action=f"click[{wanted.asin.lower()}]")
    assert 'class="pill chosen"' not in page
    colour = wanted.goal_options["color"]
    page = do(client, url, action=f"click[{colour}]")
    assert page.count('class="pill chosen"') == 1 and f"/art/{wanted.asin}/{colour}.svg" in page
    picture = client.get(f"/art/{wanted.asin}/{colour}.svg")
    assert picture.mimetype == "image/svg+xml" and picture.data != client.get(f"/art/{wanted.asin}.svg").data


@pytest.mark.parametrize(
    "query",
    [NASTY, "{{ 7 * 7 }}", "' OR 1=1 --", "unclosed [ bracket", "a]b", "search[x]", "x" * 100_000, "", "\n", "🙂 ✓", "<r>"],
)
def test_any_query_is_just_text(client: FlaskClient, query: str) -> None:
    page = do(client, begin(client), query=query)
    assert "<script" not in page and "49" not in re.sub(r"\$?\d+\.\d+", "", page.split("<aside")[1].split("</aside>")[0])
    assert "Total results" in page


def test_actions_that_are_not_possible_change_nothing(client: FlaskClient) -> None:
    url = begin(client)
    for action in ("", "click[buy now]", "click[b000000000]", NASTY, "think", "click[" + "x" * 5000 + "]"):
        page = do(client, url, action=action)
        assert "What would you like to find?" in page and "0 steps" in page and "<script" not in page


def test_markup_in_the_data_is_shown_as_text(tmp_path: Path) -> None:
    from agent_system.environments.env_package.webshop.official_files import file_sha256

    paths = generator.write_dataset(tmp_path / "data", 40, 0)
    text = paths[0].read_text("utf-8")
    paths[0].write_text(text.replace('"name": "', f'"name": "{NASTY} 🙂 '), encoding="utf-8")
    assert file_sha256(paths[0])
    shop = load_shop({"data_dir": str(tmp_path / "data"), "cache_dir": str(tmp_path / "cache")})
    client = create_app(shop).test_client()
    url = begin(client, 0)
    page = do(client, url, query="script")
    assert NASTY not in page and html.escape(NASTY) in page
    asin = re.findall(r"click\[(b0\w+)\]", page)[0]
    page = do(client, url, action=f"click[{asin}]")
    assert NASTY not in page and html.escape(NASTY) in page
    page = do(client, url, action="click[buy now]")
    assert NASTY not in page and "data-score" in page


def test_bad_requests_get_a_page_that_says_what_is_wrong(shop: ShopServer, client: FlaskClient) -> None:
    assert client.get("/shop/nobody").status_code == 404
    assert client.post("/shop/nobody/act").status_code == 404
    assert client.get("/nowhere").status_code == 404
    assert client.get("/start").status_code == 405
    answer = client.post("/start", data={"goal": "999999"})
    assert answer.status_code == 400 and f"0 to {len(shop.goals) - 1}" in answer.get_data(as_text=True)
    answer = client.post("/start", data={"goal": NASTY})
    assert answer.status_code == 400 and NASTY not in answer.get_data(as_text=True)
    assert client.post(begin(client) + "/act", data={"query": "x" * (2 << 20)}).status_code == 413
    assert client.get(f"/art/{NASTY}.svg").status_code in (200, 404)


@pytest.mark.parametrize("goal", ["-1", "1.5", "1_0", "²", "٣", "9" * 5000, "0x1", "nan", "99999999999"])
def test_what_is_no_task_number_is_answered_with_the_range(shop: ShopServer, client: FlaskClient, goal: str) -> None:
    answer = client.post("/start", data={"goal": goal})
    page = answer.get_data(as_text=True)
    assert answer.status_code == 400 and f"0 to {len(shop.goals) - 1}" in page and "is not a task number" in page


@pytest.mark.parametrize("token", ["nobody", "..", "%2e%2e%2fetc", "a" * 5000, "🙂", NASTY, "0", "None"])
def test_unknown_visits_are_not_found(client: FlaskClient, token: str) -> None:
    for answer in (client.get(f"/shop/{token}"), client.post(f"/shop/{token}/act", data={"action": "click[buy now]"})):
        assert answer.status_code in (404, 405, 308) and NASTY not in answer.get_data(as_text=True)


def test_many_people_at_once_get_their_own_pages(shop: ShopServer) -> None:
    """Threads that shop at the same time see what each would see alone; two in one visit lose no step."""
    app = create_app(shop, seed=0)
    queries = ["soft shirt", "hoodie", "lamp", "tea", "shoes", "bag"]

    def walk(query: str, client: FlaskClient) -> list[str]:
        url, seen = begin(client, 3), []
        for form in ({"query": query}, {"action": "click[next >]"}, {"query": f"{query} black"}):
            seen.append(do(client, url, **form).replace(url, ""))
        return seen

    alone = [walk(query, app.test_client()) for query in queries]
    together: list[list[str]] = [[] for _ in queries]
    url = begin(app.test_client())

    def work(number: int) -> None:
        together[number] = walk(queries[number], app.test_client())
        for _ in range(5):
            do(app.test_client(), url, query=queries[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(queries))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert together == alone
    assert f"{5 * len(queries)} steps" in app.test_client().get(url).get_data(as_text=True)


def test_a_long_visit_is_remembered_in_part(shop: ShopServer) -> None:
    visit = VisitStore(shop).open(0)
    for number in range(MAX_ACTIONS + 50):
        assert visit.act(f"search[{number} {'x' * 2000}]")
    assert visit.steps == MAX_ACTIONS + 50 and len(visit.actions) == MAX_ACTIONS
    assert visit.actions[-1].startswith(f"search[{MAX_ACTIONS + 49} x") and len(visit.actions[-1]) == MAX_ACTION_LENGTH


def test_odd_data_make_pages_all_the_same(tmp_path: Path) -> None:
    """Half characters, pictures that are no addresses, groups without values: every page can be shown."""
    pictures: list[Any] = [[5], ["javascript:alert(1)"], [None], ["https://host/'\"><script>.jpg"]]
    records = generator.generate_products(8, 0)
    attributes = {}
    for number, record in enumerate(records):
        record["name"] += " \ud83d"
        record["images"] = pictures[number % 4]
        record["customization_options"] = {"": None, 'si"z\udc00': [{"value": "x\udc00", "image": 5}]}
        attributes[record["asin"]] = {"attributes": ["a"], "instruction": "a \ud800", "instruction_attributes": ["a"]}
    records[0]["customization_options"]["empty"] = []
    for name, data in zip(generator.SMALL_FILES, (records, attributes, {}), strict=True):
        (tmp_path / name).write_text(json.dumps(data), encoding="utf-8")
    client = create_app(load_shop({"data_dir": str(tmp_path), "cache_dir": str(tmp_path / "cache")})).test_client()
    url = begin(client, 0)
    for record in records:
        page = do(client, url, query="<r>")
        asin = f"click[{record['asin'].lower()}]"
        assert page.count('class="card"') == 8 and asin in page
        for action in (asin, "click[x\ufffd]", "click[features]", "click[< prev]", "click[buy now]"):
            page = do(client, url, action=action)
            assert "<script" not in page and "javascript:" not in page
        assert "data-score" in page and "x\ufffd" in page
    assert client.get("/").status_code == 200


def test_every_answer_forbids_scripts(client: FlaskClient) -> None:
    for path in ("/", begin(client), "/art/B0.svg", "/nowhere", "/static/style.css"):
        assert client.get(path).headers["Content-Security-Policy"].startswith("default-src 'none'")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "99999"], "--port is a number"), (["--port", "-1"], "--port is a number"),
        (["--num-products", "0"], "env.webshop.num_products"), (["--data-dir", "/nowhere"], "env.webshop.data_dir=/nowhere"),
    ],
)  # fmt: skip
def test_the_command_ends_with_what_to_change(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        serve(arguments)
    assert ended.value.code in (1, 2) and says in capsys.readouterr().err


def test_old_visits_make_room(shop: ShopServer) -> None:
    store = VisitStore(shop, limit=3)
    visits = [store.open(0) for _ in range(3)]
    assert store.get(visits[0].token) is visits[0]
    store.open(1)
    assert len(store) == 3 and store.get(visits[0].token) and store.get(visits[1].token) is None


def test_pictures_are_the_same_every_time_and_hold_no_text_of_the_data() -> None:
    assert draw("B01", "shoes", "sandals", "red") == draw("B01", "shoes", "sandals", "red")
    assert draw("B01", "shoes", "sandals", "red") != draw("B01", "shoes", "sandals", "blue")
    assert "<script" not in draw(NASTY, NASTY, NASTY, NASTY) and "&" not in draw(NASTY, NASTY, NASTY)


@pytest.fixture
def served(shop: ShopServer) -> Iterator[str]:
    server = make_server("127.0.0.1", 0, create_app(shop, seed=0), threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(timeout=5)


def start_in(browser: Chromium, served: str, goal: int) -> None:
    browser.open(served)
    browser.type("#goal", str(goal))
    browser.press_enter()


def click_action(browser: Chromium, action: str) -> None:
    """What a person does for one action: types a query, or clicks the button or card."""
    if action.startswith("search["):
        browser.type("input[name=query]", action[len("search[") : -1])
        browser.press_enter()
    else:
        browser.click(f'button[value="{action}"]')


@pytest.mark.skipif(find_chromium() is None, reason="no Chromium or Chrome is installed")
def test_a_person_with_a_browser_scores_as_an_agent(shop: ShopServer, served: str, tmp_path: Path) -> None:
    program: Any = find_chromium()
    goal = next(i for i in range(len(shop.goals)) if len(shop.goals[i].goal_options) == 2)
    actions, score = expert_actions(shop, goal)
    with Chromium(program, tmp_path / "profile") as browser:
        start_in(browser, served, goal)
        assert browser.evaluate("document.querySelector('.task p').innerText") == shop.goals[goal].instruction_text
        for action in actions:
            click_action(browser, action)
        assert float(browser.evaluate("document.querySelector('#score').dataset.score")) == score
        shown = browser.evaluate("[...document.querySelectorAll('details ol li')].map(e => e.textContent)")
        assert shown == actions
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
