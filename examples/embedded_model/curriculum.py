"""Demonstrations with shorter result pages: the first lessons of the embedded model.

Reading a page means finding a product and copying its code. Ten products a page are a hard place to learn that, so the
first rows show one or two: the product that is clicked and some of its neighbours; the others are dropped from the
page, the history and the list of actions alike. Steps that click a product are one in four; ``--others`` thins out the
rest.

    python -m examples.embedded_model.curriculum demos.parquet lesson.parquet --products 1 2 --others 0
"""
from __future__ import annotations

import argparse
import logging
import os
import random
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SEPARATOR = "' [SEP] '"
CODE = re.compile(r"B0[A-Z]{8}")
CLICKED = re.compile(r"click\[(b0[a-z]{8})\]")
PRICE = re.compile(r"(\$[\d.]+(?: to \$[\d.]+)?)(.*)", re.DOTALL)


def shorten(prompt: str, response: str, products: int, rng: random.Random) -> str:
    """The prompt with at most ``products`` products, those clicked in the history or the response among them."""
    fields = prompt.split(SEPARATOR)
    codes = list(dict.fromkeys(field for field in fields if CODE.fullmatch(field)))
    history = prompt.split("Possible actions:")[0]
    kept = {code.upper() for code in CLICKED.findall(history) + CLICKED.findall(response)}
    others = [code for code in codes if code not in kept]
    kept.update(rng.sample(others, min(len(others), max(products - len(kept), 0))))
    shown: list[str] = []
    position = 0
    while position < len(fields):
        field = fields[position]
        if not CODE.fullmatch(field) or field in kept:
            shown.append(field)
            position += 1
            continue
        price = PRICE.match(fields[position + 2])
        if price is not None:
            shown[-1] += price.group(2)  # what follows the page when its last product goes
        position += 3
    lines = SEPARATOR.join(shown).split("\n")
    dropped = {f"'click[{code.lower()}]'," for code in codes if code not in kept}
    return "\n".join(line for line in lines if line not in dropped)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="demonstrations")
    parser.add_argument("target", type=Path)
    parser.add_argument("--products", type=int, nargs="+", default=[1, 2], help="products a page, drawn by row")
    parser.add_argument("--others", type=float, default=1.0, help="share of the steps kept that click no product")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    rng = random.Random(args.seed)
    table = pq.read_table(args.source, columns=["prompt", "response"]).to_pydict()
    rows = [
        (shorten(prompt, response, rng.choice(args.products), rng), response)
        for prompt, response in zip(table["prompt"], table["response"], strict=True)
        if CLICKED.search(response) or rng.random() < args.others
    ]
    prompts, responses = zip(*rows, strict=True)
    temporary = args.target.with_suffix(".tmp")
    pq.write_table(pa.table({"prompt": prompts, "response": responses}), temporary, compression="zstd")
    os.replace(temporary, args.target)
    logging.info("%d rows written to %s", len(prompts), args.target)


if __name__ == "__main__":
    main()
