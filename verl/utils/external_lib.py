"""A user's own estimators, losses and models: import their file, and its decorators register them.

`actor_rollout_ref.model.external_lib` names a Python file or an importable module, or a list of them. The driver
imports it before it looks up the estimator, each rank before it builds the model and looks up the loss.

Other processes, such as those of environments, cannot import a file by its module's name. What a file defines is
therefore sent to them by value: with the globals that it uses, as they are then.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from ray import cloudpickle

logger = logging.getLogger(__name__)


def import_external_lib(source: str | Iterable[str] | None) -> list[ModuleType]:
    """Import what `actor_rollout_ref.model.external_lib` names; once per process, however often it is called.

    Args:
        source: `path/to/file.py`, `package.module`, a list of either, or None for nothing.

    Raises:
        ValueError: there is no such file or module, or it fails while being imported.
    """
    if source is None:
        return []
    names = [source] if isinstance(source, str) else list(source)
    return [_import_one(name) for name in names]


def _import_one(name: str) -> ModuleType:
    if not name.endswith(".py"):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise ValueError(
                f"external_lib={name}: {error}; give a file (ending in .py) or an importable module"
            ) from error
        except (Exception, SystemExit) as error:
            raise ValueError(f"external_lib={name} fails with {what_failed(error)}") from error
    path = Path(name).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"external_lib={name}: there is no file {path}")
    # The name depends on the whole path, so that two files called losses.py do not shadow each other.
    module_name = f"external_{path.stem}_{hashlib.sha1(str(path).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise ValueError(f"external_lib={name} fails with {what_failed(error)}") from error
    cloudpickle.register_pickle_by_value(module)
    logger.info("imported %s", path)
    return module


def what_failed(error: BaseException) -> str:
    """One line about an error in a user's file: kind, message, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames and frames[-1].lineno else ""
    if isinstance(error, SyntaxError):  # its message has the place
        where = ""
    return f"{type(error).__name__}: {error}{where}"
