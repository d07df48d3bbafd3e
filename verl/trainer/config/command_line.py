"""The command line of an entry point: Hydra's, with the whole configuration checked before a run starts.

``hydra_main`` is the decorator of an entry point: nothing is written before the check, and where the run cannot go on
it ends with exit code 2 and one line that names the fix.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from verl.trainer.config.compose import CONFIG_DIR, CONFIG_NAME, Composition, compose, search_path_override
from verl.trainer.config.convert import to_dataclass
from verl.trainer.config.errors import ConfigError
from verl.trainer.config.failure import failure_report
from verl.trainer.config.folders import make_folders

EXIT_FAILED, EXIT_CONFIG = 1, 2
EXIT_STOPPED = 130  # as a shell gives it for Ctrl-C


def hydra_main(run: Callable[[DictConfig], Any]) -> Callable[[], None]:
    """Decorator of an entry point ``run(config)``; the result takes its arguments from ``sys.argv``.

    Hydra's own flags work (``--cfg job --resolve``, ``--config-path``, ``--multirun``, ``hydra.*`` overrides). A
    relative ``--config-path`` is looked for from the current folder. Before ``run`` is called the configuration is
    composed, typed and validated; ``explain=true`` prints it with sources and derived numbers and ends.

    Exit codes: 0 = done, 1 = the run failed, 2 = the configuration cannot run (one line on standard error), 128 + N
    = stopped by signal N, such as 130 for Ctrl-C.
    """

    @functools.wraps(run)
    def entry() -> None:
        try:
            _main(run, sys.argv[1:])
        except ConfigError as error:
            _end_with(error)
        except KeyboardInterrupt:
            sys.stderr.write("\nStopped.\n")
            sys.exit(EXIT_STOPPED)

    return entry


def _end_with(error: ConfigError) -> None:
    sys.stderr.write(f"Configuration error: {error}\n")
    sys.stderr.flush()
    sys.exit(EXIT_CONFIG)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--config-name", "-cn", default=CONFIG_NAME)
    parser.add_argument("--multirun", "-m", action="store_true")
    for flag in ("--cfg", "-c"), ("--package", "-p"), ("--config-dir", "-cd"):
        parser.add_argument(*flag)
    parser.add_argument("--info", "-i", nargs="?", const="all")
    for switch in ("--help", "-h"), ("--hydra-help",), ("--version",), ("--shell-completion", "-sc"), ("--resolve",):
        parser.add_argument(*switch, action="store_true")
    parser.add_argument("--run", "-r", action="store_true")
    parser.add_argument("overrides", nargs="*")
    return parser


def _main(run: Callable[[DictConfig], Any], argv: Sequence[str]) -> None:
    options, unknown = _arguments().parse_known_intermixed_args(list(argv))
    if unknown:
        raise ConfigError(
            f"There is no option {unknown[0]}; settings are given as key=value, and --help lists options."
        )
    folder = Path(options.config_path).expanduser().resolve() if options.config_path else CONFIG_DIR
    composition = compose(options.overrides, folder, options.config_name, options.multirun)
    informs = (options.cfg, options.info, options.help, options.hydra_help, options.version, options.shell_completion)
    if not any(informs) and not options.multirun and not _ready(composition):
        return
    passed = [one for one in argv if one not in options.overrides]
    passed = _without_option(passed, "--config-path", "-cp")
    passed = _without_option(passed, "--config-name", "-cn")
    sys.argv = [
        sys.argv[0],
        *passed,
        *_hydra_defaults(run, options.overrides, str(composition.config.trainer.run_dir)),
        *composition.overrides,
        *search_path_override(folder),
    ]

    def task(config: DictConfig) -> Any:
        try:
            if options.multirun:
                job = Composition(config, [], frozenset(), frozenset(), f"{options.config_name}.yaml")
                if not _ready(job):
                    return None
            return run(config)
        except ConfigError as error:
            return _end_with(error)
        except Exception as error:  # Hydra would hide where it came from
            sys.stderr.write(failure_report(error))
            sys.stderr.flush()
            sys.exit(EXIT_FAILED)

    hydra.main(version_base=None, config_path=str(folder), config_name=options.config_name)(task)()


def _ready(composition: Composition) -> bool:
    """Explains the configuration where that is asked for, validates it and, for a run, makes its folders.

    Returns:
        whether it is to be run.
    """
    from verl.trainer.config.explain import explain
    from verl.trainer.config.machine import resolve_device
    from verl.trainer.config.validate import validate

    config = resolve_device(to_dataclass(composition.config))
    if config.explain:
        sys.stdout.write(explain(composition) + "\n")
        sys.stdout.flush()
    validate(config)
    if not config.explain:
        make_folders(config)
    return not config.explain


def _without_option(arguments: Sequence[str], *names: str) -> list[str]:
    """Arguments without an option and its value."""
    kept, skip = [], False
    for one in arguments:
        if skip:
            skip = False
        elif one in names:
            skip = True
        elif not one.startswith(tuple(f"{name}=" for name in names)):
            kept.append(one)
    return kept


def _hydra_defaults(run: Callable[..., Any], overrides: Sequence[str], run_dir: str) -> list[str]:
    """Hydra's own record and log go to the run folder, unless the user says otherwise."""
    home = os.path.expanduser("~")
    wanted = {
        "hydra.run.dir": f"'{home}{run_dir[1:]}'" if run_dir.startswith("~/") else "${trainer.run_dir}",
        "hydra.job.name": Path(run.__code__.co_filename).stem,
    }
    given = {one.lstrip("+").split("=", 1)[0] for one in overrides}
    return [f"{key}={value}" for key, value in wanted.items() if key not in given]
