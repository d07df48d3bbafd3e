"""Fetch, check and convert the official WebShop files, or write generated ones in the same form.

    python examples/data_preprocess/webshop_data.py fetch data/webshop --base-url https://host/folder/
    python examples/data_preprocess/webshop_data.py check data/webshop
    python examples/data_preprocess/webshop_data.py convert data/webshop
    python examples/data_preprocess/webshop_data.py generate data/webshop --num-products 10000 --seed 1

A set is three files: items_shuffle_1000.json, items_ins_v2_1000.json and items_human_ins.json, or with --full the ones
without "_1000". Interrupted downloads go on where they stopped. Where people get the files: docs/webshop.md.

Training reads the folder with env.webshop.data_dir=data/webshop (and env.webshop.use_small=false for the full set).
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urljoin

from agent_system.environments.env_package.webshop.generator import write_dataset
from agent_system.environments.env_package.webshop.goal_store import open_goals, split_goals
from agent_system.environments.env_package.webshop.goals import NoGoalsError
from agent_system.environments.env_package.webshop.official_files import check_folder, download
from agent_system.environments.env_package.webshop.options import ShopOptions
from agent_system.environments.env_package.webshop.shop import open_catalogue
from agent_system.environments.env_package.webshop.sources import FULL_FILES, SMALL_FILES, ProductFiles

logger = logging.getLogger("webshop_data")


def _pairs(texts: Sequence[str], flag: str, names: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` arguments as a dict.

    Raises:
        ValueError: no "=", or a name that is not one of the set's files.
    """
    pairs: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or name not in names:
            raise ValueError(f"{flag} takes NAME=VALUE with a name of {', '.join(names)}; got {text!r}")
        pairs[name] = value
    return pairs


def fetch(arguments: argparse.Namespace) -> None:
    """Download the files of a set that are not there yet, then check the folder."""
    names = FULL_FILES if arguments.full else SMALL_FILES
    urls = _pairs(arguments.url, "--url", names)
    checksums = _pairs(arguments.sha256, "--sha256", names)
    folder = Path(arguments.folder)
    for name in names:
        if arguments.base_url:
            urls.setdefault(name, urljoin(arguments.base_url.rstrip("/") + "/", name))
        if name in urls:
            download(urls[name], folder / name, checksums.get(name))
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(f"no url for {', '.join(missing)}: give --base-url, or --url NAME=URL for each")
    check(arguments)


def check(arguments: argparse.Namespace) -> None:
    """Report on a folder's files; with ``--json`` the report is also written for programs."""
    files = ProductFiles.in_folder(Path(arguments.folder), use_small=not arguments.full)
    report = check_folder(files.products, files.attributes, files.human, num_products=arguments.num_products)
    for line in report.lines():
        logger.info(line)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")


def convert(arguments: argparse.Namespace) -> None:
    """Build the memory-mapped catalogue and goal lists that training opens, so that the first run does not have to."""
    overrides = {"cache_dir": arguments.cache_dir} if arguments.cache_dir else {}
    options = ShopOptions(
        data_dir=arguments.folder, use_small=not arguments.full, num_products=arguments.num_products, **overrides
    )
    catalogue = open_catalogue(options)
    size = sum(path.stat().st_size for path in catalogue.folder.iterdir())
    logger.info("%s: %d products, %.1f MB", catalogue.folder, len(catalogue), size / 1e6)
    for human in (False, True):
        try:
            goals = open_goals(catalogue, human, options.cache_path)
        except NoGoalsError as error:
            logger.warning("%s", error)
            continue
        split = split_goals(goals, options.validation_goals)
        logger.info("%s goals: %d, split %s", "human" if human else "synthetic", len(goals), split.digest)


def generate(arguments: argparse.Namespace) -> None:
    """Write a generated shop under the official file names."""
    try:
        paths = write_dataset(arguments.folder, arguments.num_products or 1000, arguments.seed)
    except OSError as error:
        raise ValueError(f"{arguments.folder} cannot be written to ({error})") from error
    for path in paths:
        logger.info("%s: %d bytes", path, path.stat().st_size)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for action in (fetch, check, convert, generate):
        command = commands.add_parser(action.__name__, help=(action.__doc__ or "").split("\n")[0])
        command.set_defaults(action=action)
        command.add_argument("folder", help="folder of the files")
        command.add_argument("--num-products", type=int, default=None, help="read (or write) that many records")
        if action is generate:
            command.add_argument("--seed", type=int, default=0)
            continue
        command.add_argument("--full", action="store_true", help="the full set instead of the 1,000-product one")
        if action is convert:
            command.add_argument("--cache-dir", default=None, help="as env.webshop.cache_dir")
            continue
        command.add_argument("--json", default=None, metavar="PATH", help="write the report there as well")
        if action is fetch:
            command.add_argument("--base-url", default=None, help="url of a folder that holds the files")
            command.add_argument("--url", action="append", default=[], metavar="NAME=URL", help="url of one file")
            command.add_argument("--sha256", action="append", default=[], metavar="NAME=HEX", help="expected checksum")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 when it worked, 1 with the reason logged when it did not."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parsed = _parser().parse_args(arguments)
    try:
        if parsed.num_products is not None and parsed.num_products < 1:
            raise ValueError(f"--num-products={parsed.num_products} has to be at least 1")
        parsed.action(parsed)
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
