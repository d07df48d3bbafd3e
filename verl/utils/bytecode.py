"""Bytecode of the libraries, where an environment keeps none.

Python compiles a module when it imports it and keeps the result beside it. Images of containers are often made without
such files, and with ``PYTHONDONTWRITEBYTECODE`` set or folders that cannot be written to. Every process then compiles
thousands of modules anew, which takes several times as long as the imports themselves.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

LARGEST = ("ray", "torch", "transformers", "vllm")


def keep_bytecode(cache_dir: str | None, packages: Iterable[str] = LARGEST) -> None:
    """Let this process and its children keep bytecode in ``cache_dir``, if that of a package is kept nowhere.

    Nothing is changed where ``PYTHONPYCACHEPREFIX`` names a folder already, where bytecode lies beside the packages or
    will once they are imported, or for a ``cache_dir`` of None.
    """
    if cache_dir is None or sys.pycache_prefix is not None or not any(map(_never_kept, packages)):
        return
    folder = Path(cache_dir).expanduser().absolute() / "bytecode"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("the libraries here have no bytecode, and none can be kept in %s (%s)", folder, error.strerror)
        return
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    logger.info("the libraries here have no bytecode: it is kept in %s from the first start on", folder)


def _never_kept(package: str) -> bool:
    """Whether an installed package has no bytecode, and Python will not write any; the package is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return False
    bytecode = Path(importlib.util.cache_from_source(spec.origin))
    if bytecode.exists():
        return False
    folder = bytecode.parent if bytecode.parent.exists() else bytecode.parent.parent
    return sys.dont_write_bytecode or not os.access(folder, os.W_OK)
