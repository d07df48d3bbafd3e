"""How fast and how large the shop is, each figure beside the original WebShop's where that was measured.

::

    python -m benchmarks.webshop load              # build, and open again, 200 to 10,000 products
    python -m benchmarks.webshop memory            # 1 and 256 sessions in a process; several processes
    python -m benchmarks.webshop steps             # steps and resets per second of a random agent
    python -m benchmarks.webshop full              # 1.18 million products: build, disk, open, memory, searches
    python -m benchmarks.webshop all               # the first three

Every measurement runs in a process of its own. The original's figures: one core of a two-core machine, Lucene through
pyserini, a random agent that asks for the list of available actions at every step, product data in the same schema.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

logger = logging.getLogger("benchmarks.webshop")

FULL_SIZE = 1_180_000
ORIGINAL: dict[int, dict[str, Any]] = {
    200: {"load_s": "0.15-0.21", "rss_mb": "511-525", "steps_per_s": "48-49", "reset_ms": "3.6"},
    1_000: {"load_s": "0.27-0.29", "rss_mb": "527", "steps_per_s": "52", "reset_ms": "3-7"},
    10_000: {"load_s": "1.3-1.5", "rss_mb": "714-747", "steps_per_s": "38-44", "reset_ms": "3.8"},
}
ORIGINAL_IMPORT_S = "3.4-5.9"


def _open(cache: str, products: int) -> Any:
    from agent_system.environments.env_package.webshop.session import load_shop

    return load_shop(num_products=products, cache_dir=cache)


def _memory_mb() -> dict[str, float]:
    """Resident memory of this process: all of it, what is its own, and the pages of files that processes share."""
    fields = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, value, *_ = line.split()
        fields[name.rstrip(":")] = int(value) / 1024
    return {"rss_mb": fields["Rss"], "own_mb": fields["Anonymous"], "shared_mb": fields["Rss"] - fields["Anonymous"]}


def _wander(session: Any, rng: random.Random, goal: int, steps: int) -> int:
    """A random agent that asks for the available actions at every step, as the original's figures have it."""
    session.reset(goal)
    for step in range(steps):
        actions = session.available_actions()
        if actions["has_search_bar"]:
            action = f"search[{rng.choice([session.instruction_text, session.goal.query])}]"
        else:
            action = f"click[{rng.choice(actions['clickables'])}]"
        if session.step(action)[2]:
            return step + 1
    return steps


def _import_seconds() -> float:
    code = (
        "import time; t = time.perf_counter();"
        "import agent_system.environments.env_package.webshop.session; print(time.perf_counter() - t)"
    )
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def measure_load(cache: str, products: int) -> dict[str, float]:
    start = time.perf_counter()
    shop = _open(cache, products)
    return {"seconds": time.perf_counter() - start, "goals": len(shop.goals), **_memory_mb()}


def measure_sessions(cache: str, products: int, sessions: int) -> dict[str, float]:
    """Memory after every session has played an episode and stands on some page."""
    from agent_system.environments.env_package.webshop.session import ShopSession

    shop = _open(cache, products)
    shoppers = [ShopSession(shop, rng=random.Random(i)) for i in range(sessions)]
    for number in range(max(sessions, 256)):
        _wander(shoppers[number % sessions], random.Random(number), number % len(shop.goals), 15)
    return _memory_mb()


def measure_steps(cache: str, products: int, mode: str, seconds: float = 5.0) -> dict[str, float]:
    from agent_system.environments.env_package.webshop.session import ShopSession

    shop = _open(cache, products)
    session = ShopSession(shop, mode=mode, rng=random.Random(0))
    rng = random.Random(1)
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        steps += _wander(session, rng, rng.randrange(len(shop.goals)), 15)
    rate = steps / (time.perf_counter() - start)
    times = []
    for goal in range(500):
        begin = time.perf_counter()
        session.reset(goal % len(shop.goals))
        times.append(time.perf_counter() - begin)
    return {"steps_per_s": rate, "reset_ms": 1e3 * float(np.median(times))}


def query_texts(shop: Any, count: int, seed: int) -> dict[str, list[str]]:
    """Queries an agent types: the whole instruction, its subject with attributes, its subject, a title."""
    rng = random.Random(seed)
    goals = [shop.goals[rng.randrange(len(shop.goals))] for _ in range(count)]
    return {
        "instruction": [goal.instruction_text for goal in goals],
        "subject and attributes": [f"{goal.query} {' '.join(goal.attributes)}" for goal in goals],
        "subject": [goal.query for goal in goals],
        "title": [goal.name for goal in goals],
    }


def measure_searches(cache: str, products: int, seed: int, count: int = 400) -> dict[str, Any]:
    """Search times without the cache of recent queries, and the memory after them and some thousand steps."""
    from agent_system.environments.env_package.webshop.session import ShopSession

    start = time.perf_counter()
    shop = _open(cache, products)
    result: dict[str, Any] = {"open_s": time.perf_counter() - start, "goals": len(shop.goals)}
    everything = []
    for kind, texts in query_texts(shop, count, seed).items():
        times = []
        for text in texts:
            begin = time.perf_counter()
            shop.catalogue.index.search(text)
            times.append(1e3 * (time.perf_counter() - begin))
        everything += times
        result[kind] = {f"p{p}_ms": float(np.percentile(times, p)) for p in (50, 99)}
    result["all"] = {f"p{p}_ms": float(np.percentile(everything, p)) for p in (50, 99)}
    session, rng, steps = ShopSession(shop, rng=random.Random(seed)), random.Random(seed), 0
    begin = time.perf_counter()
    while steps < 3000:
        steps += _wander(session, rng, rng.randrange(len(shop.goals)), 15)
    result["steps_per_s"] = steps / (time.perf_counter() - begin)
    return result | _memory_mb()


def _alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)`` in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _together(count: int, function: Callable[..., Any], arguments: list[tuple]) -> list[Any]:
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        return [future.result() for future in [pool.submit(function, *each) for each in arguments]]


def run_load(cache: str) -> dict[str, Any]:
    rows = {}
    for products, original in ORIGINAL.items():
        built, opened = _alone(measure_load, cache, products), _alone(measure_load, cache, products)
        rows[products] = {
            "build_s": built["seconds"],
            "open_s": opened["seconds"],
            "original_load_s": original["load_s"],
        }
    return {"products": rows, "import_s": _import_seconds(), "original_import_s": ORIGINAL_IMPORT_S}


def run_memory(cache: str) -> dict[str, Any]:
    rows = {}
    for products, original in ORIGINAL.items():
        one, many = _alone(measure_sessions, cache, products, 1), _alone(measure_sessions, cache, products, 256)
        rows[products] = {
            "1_session_mb": one["rss_mb"],
            "256_sessions_mb": many["rss_mb"],
            "ratio": many["rss_mb"] / one["rss_mb"],
            "original_1_session_mb": original["rss_mb"],
        }
    return rows


def run_steps(cache: str) -> dict[str, Any]:
    rows = {}
    for products, original in ORIGINAL.items():
        modes = {mode: _alone(measure_steps, cache, products, mode) for mode in ("text", "text_rich", "html")}
        rows[products] = {f"{mode}_steps_per_s": value["steps_per_s"] for mode, value in modes.items()}
        rows[products] |= {"reset_ms": modes["text"]["reset_ms"]}
        rows[products] |= {f"original_{name}": original[name] for name in ("steps_per_s", "reset_ms")}
    return rows


def run_full(cache: str, products: int) -> dict[str, Any]:
    """Build, then two processes at once, each opening the catalogue, searching and stepping."""
    built = _alone(measure_load, cache, products)
    files = [path for path in Path(cache).rglob("*") if path.is_file()]
    workers = _together(2, measure_searches, [(cache, products, seed) for seed in range(2)])
    return {
        "products": products,
        "build_s": built["seconds"],
        "build_rss_mb": built["rss_mb"],
        "disk_gib": sum(path.stat().st_size for path in files) / 2**30,
        "shared_gib": max(worker["shared_mb"] for worker in workers) / 1024,
        "own_mb": max(worker["own_mb"] for worker in workers),
        "workers": workers,
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 4 if abs(value) < 1 else 2) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("load", "memory", "steps", "full", "all"))
    parser.add_argument("--products", type=int, default=FULL_SIZE, help="for full")
    parser.add_argument("--cache", help="keep built catalogues in this folder (default: a temporary one)")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    cache = arguments.cache or tempfile.mkdtemp(prefix="webshop-benchmark-")
    commands: dict[str, Callable[[], Any]] = {
        "load": lambda: run_load(cache),
        "memory": lambda: run_memory(cache),
        "steps": lambda: run_steps(cache),
        "full": lambda: run_full(cache, arguments.products),
    }
    names = ("load", "memory", "steps") if arguments.command == "all" else (arguments.command,)
    try:
        result = {"cores": os.cpu_count(), "python": sys.version.split()[0]} | {
            name: commands[name]() for name in names
        }
        print(json.dumps(_rounded(result), indent=1))
    finally:
        if not arguments.cache:
            shutil.rmtree(cache, ignore_errors=True)


if __name__ == "__main__":
    main()
