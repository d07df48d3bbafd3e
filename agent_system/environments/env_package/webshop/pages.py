"""The shop's pages as sequences of nodes, and their renderings.

A page is built once as nodes; text, text_rich and html are three ways to write it down, so they cannot disagree. The
text modes never touch HTML.

White space follows what a browser's parser leaves of it: an empty text is no node; a text of blanks alone is dropped if
it has a line break and is one blank otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from html import escape

from agent_system.environments.env_package.webshop.records import Product

SEPARATOR = " [SEP] "
PAGE_SIZE = 10
_ASCII_BLANKS = " \n\t\f\r"

SEARCH = "Search"
BACK_TO_SEARCH = "Back to Search"
PREVIOUS = "< Prev"
NEXT = "Next >"
BUY = "Buy Now"
DESCRIPTION, FEATURES, REVIEWS, ATTRIBUTES = "Description", "Features", "Reviews", "Attributes"
SUB_PAGES = {name.lower(): name for name in (DESCRIPTION, FEATURES, REVIEWS, ATTRIBUTES)}


class Kind(Enum):
    """What a node is to the reader."""

    TEXT = "text"
    BUTTON = "button"
    LINK = "product link"
    OPTION = "option"


@dataclass(slots=True)
class Node:
    """One visible text. ``group`` is the option group of an option node."""

    text: str
    kind: Kind = Kind.TEXT
    group: str = ""


@dataclass(slots=True)
class Page:
    """A page: its nodes in order, and whether it has the search bar."""

    name: str
    nodes: list[Node] = field(default_factory=list)
    has_search_bar: bool = False

    def text(self, text: str) -> None:
        """Append a text node, unless the text leaves none."""
        if not text.strip(_ASCII_BLANKS):
            if not text or "\n" in text:
                return
            text = " "
        self.nodes.append(Node(text))

    def buttons(self, *labels: str) -> None:
        self.nodes.extend([Node(label, Kind.BUTTON) for label in labels])

    def clickables(self) -> dict[str, Node]:
        """What can be clicked, by lower-cased text: buttons, then product links, then options.

        Equal texts share the first one's place and are the last one's element.
        """
        found: dict[str, Node] = {}
        for kind in (Kind.BUTTON, Kind.LINK, Kind.OPTION):
            for node in self.nodes:
                if node.kind is kind:
                    found[node.text if kind is Kind.OPTION else node.text.lower()] = node
        return found

    def as_text(self) -> str:
        """Mode ``text``: stripped nodes in one line. (An option without text can be clicked but not seen.)"""
        return SEPARATOR.join([node.text.strip() for node in self.nodes if node.text])

    def as_rich_text(self, url: str, visited: Collection[str]) -> str:
        """Mode ``text_rich``: one line a node, buttons marked, clicked ones told at the top."""
        clicked: list[str] = []
        lines: list[str] = []
        for node in self.nodes:
            if not node.text:
                continue
            if node.kind is Kind.TEXT:
                lines.append(node.text)
            elif node.kind is Kind.BUTTON:
                lines.append(f"[button] {node.text} [button_]")
            elif node.kind is Kind.LINK:
                word = "clicked button" if node.text in visited else "button"
                lines.append(f"\n[{word}] {node.text} [{word}_]")
            elif f'"{node.text}"' in url:
                lines.append(f"  [clicked button] {node.text} [clicked button_]")
                clicked.append(node.text)
            else:
                lines.append(f"  [button] {node.text} [button_]")
        told = [f"You have clicked {text}." for text in reversed(clicked)]
        return "".join(line + "\n" for line in told + lines)

    def as_html(self) -> str:
        """Mode ``html``: a small page with the same nodes; buttons, links and radio inputs where it has them."""
        body = "\n".join(_html_node(number, node) for number, node in enumerate(self.nodes))
        form = '<input type="text" id="search_input" name="search_query">\n' if self.has_search_bar else ""
        return (
            f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>WebShop</title></head>\n'
            f'<body class="{self.name}">\n{form}{body}\n</body>\n</html>\n'
        )


def _html_node(number: int, node: Node) -> str:
    text = escape(node.text)
    if node.kind is Kind.BUTTON:
        return f'<button type="button" class="btn">{text}</button>'
    if node.kind is Kind.LINK:
        return f'<a class="product-link" href="#">{text}</a>'
    if node.kind is Kind.OPTION:
        name, at = escape(node.group), f"option-{number}"
        return f'<input type="radio" id="{at}" name="{name}" value="{text}"><label for="{at}">{text}</label>'
    return f"<span>{text}</span>"


def search_page(instruction: str) -> Page:
    page = Page("search", has_search_bar=True)
    page.text("WebShop")
    page.text("Instruction: ")
    page.text(instruction)
    page.buttons(SEARCH)
    return page


def _headed(name: str, instruction: str) -> Page:
    page = Page(name)
    page.text("Instruction:")
    page.text(instruction)
    page.buttons(BACK_TO_SEARCH)
    return page


def results_page(instruction: str, number: int, total: int, products: Sequence[tuple[str, str, str]]) -> Page:
    """``products``: asin, title and price tag of each product on the page."""
    page = _headed("results", instruction)
    page.text(f"Page {number} (Total results: {total})")
    if number > 1:
        page.buttons(PREVIOUS)
    page.buttons(NEXT)
    for asin, title, price_tag in products:
        page.nodes.append(Node(asin, Kind.LINK))
        page.text(title)
        page.text(price_tag)
    return page


def item_page(instruction: str, product: Product, show_attrs: bool) -> Page:
    page = _headed("item", instruction)
    page.buttons(PREVIOUS)
    for name, values in product.options.items():
        page.text(name)
        page.nodes.extend([Node(value, Kind.OPTION, name) for value in values])
    page.text(product.title or "")
    page.text(f"Price: {product.price_tag}")
    page.text("Rating: N.A.")
    page.buttons(DESCRIPTION, FEATURES, REVIEWS)
    if show_attrs:
        page.buttons(ATTRIBUTES)
    page.buttons(BUY)
    return page


def sub_page(instruction: str, product: Product, name: str) -> Page:
    """One of the pages behind a product's buttons."""
    page = _headed("item_sub", instruction)
    page.buttons(PREVIOUS)
    if name == DESCRIPTION:
        page.text(product.description or "")
    elif name == FEATURES:
        for bullet in product.bullets:
            page.text(f" {bullet}")
    elif name == ATTRIBUTES:
        for attribute in product.attributes:
            page.text(f" {attribute}")
        page.text(product.category or "")
        page.text(product.query)
        page.text(product.product_category or "")
    return page


def done_page(asin: str, options: dict[str, str], reward: float) -> Page:
    """The page after a purchase. Its wording is part of the observation and is the original's."""
    page = Page("done")
    shown = json.dumps(options, sort_keys=True)
    for mark in "<>&'":
        shown = shown.replace(mark, f"\\u{ord(mark):04x}")
    texts = (
        "Thank you for shopping with us!", "Your code: ", "None", " (Paste it in your MTurk interface.)",
        "Purchased", "asin", asin, "options", shown, "attrs", "None", "category", "None", "query", "None",
        "product category", "None",
        "Target", "asin", "options", "attrs", "price upper", "instuction text", "category", "product category", "query",
        "Goal ", "None", "Reward", "Your score (min 0.0, max 1.0)", str(reward), "Reward Details ", "None",
    )  # fmt: skip
    for text in texts:
        page.text(text)
    return page
