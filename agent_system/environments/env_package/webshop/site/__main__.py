"""Serve the shop: ``python -m agent_system.environments.env_package.webshop.site``."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence

from agent_system.environments.env_package.webshop.session import load_shop
from agent_system.environments.env_package.webshop.site.app import create_app

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Open the shop and serve it until interrupted."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description="The WebShop site for people.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (0.0.0.0 shows it to the network)")
    parser.add_argument("--port", type=int, default=3000)
    parser.add_argument("--data-dir", default=None, help="folder with the official files; none: the embedded shop")
    parser.add_argument("--full", action="store_true", help="with --data-dir: the full set, not the 1,000-product one")
    parser.add_argument("--num-products", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0, help="seed of the embedded shop")
    parser.add_argument("--human-goals", action="store_true", help="tasks in people's words")
    parser.add_argument("--show-attrs", action="store_true", help="offer the attributes of a product")
    parsed = parser.parse_args(arguments)
    if not 0 <= parsed.port <= 65535:
        parser.error(f"--port is a number from 0 (any that is free) to 65535, got {parsed.port}")
    try:
        server = load_shop(
            data_dir=parsed.data_dir,
            use_small=not parsed.full,
            num_products=parsed.num_products,
            seed=parsed.seed,
            human_goals=parsed.human_goals,
            show_attrs=parsed.show_attrs,
        )
    except ValueError as error:
        parser.exit(1, f"{error}\n")
    products, tasks = len(server.catalogue), len(server.goals)
    logger.info("%d products, %d tasks: http://%s:%d", products, tasks, parsed.host, parsed.port)
    create_app(server).run(host=parsed.host, port=parsed.port, threaded=True)


if __name__ == "__main__":
    main()
