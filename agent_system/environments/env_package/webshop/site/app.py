"""The Flask application: pages over :class:`ShopSession`, one form post per agent action."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from typing import Any

from flask import Flask, Response, abort, redirect, render_template, request, url_for
from werkzeug.wrappers import Response as BaseResponse

from agent_system.environments.env_package.webshop.pages import SUB_PAGES, Kind, Page
from agent_system.environments.env_package.webshop.records import Product
from agent_system.environments.env_package.webshop.session import ShopServer
from agent_system.environments.env_package.webshop.site.art import draw
from agent_system.environments.env_package.webshop.site.explain import explain
from agent_system.environments.env_package.webshop.site.visits import Visit, VisitStore

__all__ = ["create_app"]

logger = logging.getLogger(__name__)

_MAX_REQUEST_BYTES = 1 << 20
_SHOWN_TASKS = 6
_SHELF = 6  # pictures that only decorate a page
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src 'self' https:; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_TEMPLATES = {"search": "search.html", "results": "results.html", "item": "item.html", "item_sub": "sub.html"}


@dataclass(frozen=True)
class Card:
    """A product as a list shows it."""

    asin: str
    title: str
    price: str
    picture: str
    action: str


def create_app(server: ShopServer, seed: int | None = None) -> Flask:
    """The site over one shop.

    Args:
        server: the shop, shared by all visits.
        seed: seeds which tasks the front page offers; None draws them anew.
    """
    app = Flask(__name__)
    app.config["MAX_CONTENT_LENGTH"] = _MAX_REQUEST_BYTES
    app.config["MAX_FORM_MEMORY_SIZE"] = _MAX_REQUEST_BYTES
    visits = VisitStore(server)
    rng = random.Random(seed)
    app.extensions["webshop_visits"] = visits

    @app.after_request
    def harden(response: Response) -> Response:
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    @app.errorhandler(404)
    @app.errorhandler(413)
    @app.errorhandler(400)
    @app.errorhandler(405)
    def failed(error: Any) -> tuple[str, int]:
        return render_template("error.html", error=error), error.code

    @app.get("/")
    def home() -> str:
        count = len(server.goals)
        offered = rng.sample(range(count), min(_SHOWN_TASKS, count))
        tasks = [(index, server.goals[index].instruction_text) for index in offered]
        shelf = _shelf(server, rng)
        return render_template(
            "home.html", tasks=tasks, goals=count, products=len(server.catalogue), error="", shelf=shelf
        )

    @app.post("/start")
    def start() -> BaseResponse | tuple[str, int]:
        text = request.form.get("goal", "").strip()
        count = len(server.goals)
        if text and not (text.isascii() and text.isdigit() and len(text) < 12 and int(text) < count):
            reason = f"'{text[:40]}' is not a task number: they go from 0 to {count - 1}"
            page = render_template(
                "home.html", tasks=[], goals=count, products=len(server.catalogue), error=reason, shelf=[]
            )
            return page, 400
        visit = visits.open(int(text) if text else None)
        return redirect(url_for("shop", token=visit.token), code=303)

    @app.get("/shop/<token>")
    def shop(token: str) -> str:
        visit = visits.get(token) or abort(404)
        with visit.lock:
            return _render(visit)

    @app.post("/shop/<token>/act")
    def act(token: str) -> BaseResponse:
        visit = visits.get(token) or abort(404)
        with visit.lock:
            visit.act(_action_of_form())
        return redirect(url_for("shop", token=token), code=303)

    @app.get("/art/<asin>.svg", defaults={"value": ""})
    @app.get("/art/<asin>/<value>.svg")
    def art(asin: str, value: str) -> Response:
        row = server.catalogue.row_of(asin)
        product = server.catalogue.product(row) if row is not None else None
        category, kind = (product.category or "", product.query) if product else ("", "")
        picture = Response(draw(asin, category, kind, value), mimetype="image/svg+xml")
        picture.headers["Cache-Control"] = "max-age=86400"
        return picture

    return app


def _action_of_form() -> str:
    """The action that a form stands for: a typed query, or the one its button names.

    Brackets and line breaks of a typed query would end the action early, so they count as spaces.
    """
    query = request.form.get("query")
    if query is None:
        return request.form.get("action", "")
    for mark in "[]\r\n":
        query = query.replace(mark, " ")
    return f"search[{query.strip() or ' '}]"


def _render(visit: Visit) -> str:
    """The current page of a visit."""
    session = visit.session
    page = session.page
    common = {
        "visit": visit,
        "page": page,
        "instruction": session.instruction_text,
        "observation": session.render("text").split(" [SEP] "),
        "actions": _agent_actions(visit),
        "buttons": {node.text: f"click[{node.text.lower()}]" for node in page.nodes if node.kind is Kind.BUTTON},
    }
    product = visit.product
    if page.name == "done" and product is not None:
        return render_template("done.html", **common, **_done_view(visit, product))
    if page.name == "item" and product is not None:
        return render_template("item.html", **common, **_item_view(visit, page, product))
    if page.name == "item_sub":
        texts = [node.text.strip() for node in page.nodes if node.kind is Kind.TEXT][2:]
        heading = SUB_PAGES.get(visit.actions[-1].removeprefix("click[").removesuffix("]"), "")
        picture = "" if product is None else _picture(product, session.selected_options)
        return render_template("sub.html", **common, product=product, texts=texts, heading=heading, picture=picture)
    if page.name == "results":
        cards = [_card(visit, node.text) for node in page.nodes if node.kind is Kind.LINK]
        summary = next((node.text for node in page.nodes if node.text.startswith("Page ")), "")
        return render_template("results.html", **common, cards=cards, summary=summary, query=_last_query(visit))
    shelf = _shelf(session.server, random.Random(visit.token))
    return render_template("search.html", **common, shelf=shelf)


def _shelf(server: ShopServer, rng: random.Random) -> list[str]:
    """Addresses of pictures of some products."""
    catalogue = server.catalogue
    rows = rng.sample(range(len(catalogue)), min(_SHELF, len(catalogue)))
    return [_picture(catalogue.product(row)) for row in rows]


def _agent_actions(visit: Visit) -> list[str]:
    available = visit.session.available_actions()
    search = ["search[...]"] if available["has_search_bar"] else []
    return search + [f"click[{text}]" for text in available["clickables"] if text != "search"]


def _last_query(visit: Visit) -> str:
    queries = [action for action in visit.actions if action.startswith("search[")]
    return queries[-1][len("search[") : -1].strip() if queries else ""


def _card(visit: Visit, asin: str) -> Card:
    catalogue = visit.session.server.catalogue
    row = catalogue.row_of(asin)
    assert row is not None, "result pages show products of this catalogue"
    product = catalogue.product(row)
    return Card(asin, product.title or asin, product.price_tag, _picture(product), f"click[{asin.lower()}]")


def _picture(product: Product, chosen: dict[str, str] | None = None) -> str:
    """Address of the picture to show: of a chosen option, of the product, or a drawn one."""
    urls = [product.option_images.get(value) for value in reversed((chosen or {}).values())]
    for url in [*urls, product.main_image]:
        if url and url.startswith("https://"):
            return url
    colour = (chosen or {}).get("color", "")
    if colour:
        return url_for("art", asin=product.asin, value=colour)
    return url_for("art", asin=product.asin)


def _item_view(visit: Visit, page: Page, product: Product) -> dict[str, Any]:
    """Options by group with what is chosen, and the product's texts."""
    chosen = visit.session.selected_options
    groups: dict[str, list[tuple[str, str, bool]]] = {name: [] for name in product.options}
    for node in page.nodes:
        if node.kind is Kind.OPTION:
            is_chosen = chosen.get(node.group.lower()) == node.text
            groups[node.group].append((node.text, f"click[{node.text}]", is_chosen))
    return {"product": product, "groups": groups, "chosen": chosen, "picture": _picture(product, chosen)}


def _done_view(visit: Visit, product: Product) -> dict[str, Any]:
    """What was bought, what was wanted, and the score taken apart."""
    session = visit.session
    server = session.server
    reward, goal, chosen = session.reward, session.goal, session.selected_options
    row = server.catalogue.row_of(product.asin)
    assert reward is not None and row is not None, "the done page follows a purchase"
    wanted = _card(visit, goal.asin)
    return {
        "product": product,
        "chosen": chosen,
        "picture": _picture(product, chosen),
        "explanation": explain(reward, goal, product, chosen, float(server.goals.prices[row])),
        "wanted": wanted,
        "goal_index": session.goal_index,
    }
