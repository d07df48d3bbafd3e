"""Entry points with a configuration of their own (``generation.yaml``, ``evaluation.yaml``, ``sft_trainer.yaml``).

They compose with Hydra as training does, with the same messages for keys and values that do not fit, and without its
presets, run folder and multirun.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from omegaconf import OmegaConf

from verl.trainer.config.command_line import EXIT_CONFIG, EXIT_FAILED, EXIT_STOPPED
from verl.trainer.config.compose import CONFIG_DIR, compose
from verl.trainer.config.convert import root_from_config
from verl.trainer.config.errors import ConfigError
from verl.trainer.config.failure import failure_report
from verl.trainer.config.schema.node import ConfigNode

NodeT = TypeVar("NodeT", bound=ConfigNode)


def compose_tool(node_type: type[NodeT], config_name: str, overrides: Sequence[str] = ()) -> NodeT:
    """The typed configuration ``{config_name}.yaml`` with overrides.

    Raises:
        ConfigError: an override that cannot be read, a key that does not exist, a value of the wrong type.
    """
    return root_from_config(node_type, compose(overrides, CONFIG_DIR, config_name, root=node_type).config)


def output_problem(key: str, name: str) -> str | None:
    """Why a file could not be written in the end, asked before the work begins; None if it could."""
    path = Path(name).expanduser().absolute()
    if path.is_dir():
        return f"{key}={name} is a folder; give a file"
    above = next(folder for folder in path.parents if folder.exists())
    if not above.is_dir():
        return f"{key}={name}: {above} is a file, not a folder"
    if not os.access(above, os.W_OK):
        return f"{key}={name}: {above} cannot be written to"
    return None


def tool_main(
    node_type: type[NodeT], config_name: str, stopped: str = "Stopped; nothing was written."
) -> Callable[[Callable[[NodeT], Any]], Callable[[], None]]:
    """Decorator of an entry point ``run(config)``; the result takes its arguments from ``sys.argv``.

    ``--cfg job`` prints the configuration. Exit codes: 0 = done, 1 = it failed, 2 = the configuration cannot
    work, 130 = Ctrl-C, which is answered with ``stopped``.
    """

    def decorate(run: Callable[[NodeT], Any]) -> Callable[[], None]:
        @functools.wraps(run)
        def entry() -> None:
            parser = argparse.ArgumentParser(description=run.__doc__, allow_abbrev=False)
            parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"keys of {config_name}.yaml")
            parser.add_argument("--cfg", "-c", choices=("job",), help="print the configuration and stop")
            parser.add_argument("--resolve", action="store_true", help="has no effect: values are always resolved")
            arguments = parser.parse_intermixed_args()
            logging.basicConfig(level=logging.INFO, format="[%(asctime)s][%(name)s][%(levelname)s] %(message)s")
            sys.exit(exit_code(lambda: _compose_and_run(run, node_type, config_name, arguments), stopped))

        return entry

    return decorate


def _compose_and_run(
    run: Callable[[NodeT], Any], node_type: type[NodeT], config_name: str, arguments: argparse.Namespace
) -> None:
    config = compose_tool(node_type, config_name, arguments.overrides)
    if arguments.cfg:
        sys.stdout.write(OmegaConf.to_yaml(OmegaConf.create(config.to_dict())))
    else:
        run(config)


@contextmanager
def sigterm_stops() -> Iterator[None]:
    """SIGTERM is answered like Ctrl-C. Enter it after ``ray.init``, whose own answer is an abort."""
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def exit_code(action: Callable[[], Any], stopped: str) -> int:
    """Runs ``action`` and says on standard error how it failed, if it did; ``stopped`` is what Ctrl-C is answered."""
    try:
        action()
    except ConfigError as error:
        sys.stderr.write(f"Configuration error: {error}\n")
        return EXIT_CONFIG
    except KeyboardInterrupt:
        sys.stderr.write(f"\n{stopped}\n")
        return EXIT_STOPPED
    except Exception as error:
        sys.stderr.write(failure_report(error))
        return EXIT_FAILED
    return 0
