"""Optional packages and code that users bring in their own files."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from verl.utils.external_lib import import_external_lib

__all__ = [
    "deprecated",
    "import_external_libs",
    "is_megatron_core_available",
    "is_nvtx_available",
    "is_sglang_available",
    "is_trl_available",
    "is_vllm_available",
    "load_extern_type",
]

logger = logging.getLogger(__name__)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


@functools.cache
def is_megatron_core_available() -> bool:
    """Whether ``megatron.core`` can be imported."""
    return _is_installed("megatron.core")


@functools.cache
def is_vllm_available() -> bool:
    """Whether ``vllm`` can be imported."""
    return _is_installed("vllm")


@functools.cache
def is_sglang_available() -> bool:
    """Whether ``sglang`` can be imported."""
    return _is_installed("sglang")


@functools.cache
def is_nvtx_available() -> bool:
    """Whether ``nvtx`` can be imported."""
    return _is_installed("nvtx")


@functools.cache
def is_trl_available() -> bool:
    """Whether ``trl`` can be imported."""
    return _is_installed("trl")


def import_external_libs(external_libs: str | Iterable[str] | None = None) -> None:
    """Import the user's files or modules (``*.model.external_lib``), for what they register when imported.

    See :func:`verl.utils.external_lib.import_external_lib`, which also returns them.
    """
    import_external_lib(external_libs)


def load_extern_type(file_path: str | Path | None, type_name: str) -> Any:
    """The attribute ``type_name`` of a Python file; ``None`` when ``file_path`` is empty.

    Raises:
        FileNotFoundError: there is no such file.
        RuntimeError: the file fails to load (its own error is the cause).
        AttributeError: it has no such attribute.
    """
    if not file_path:
        return None
    path = Path(file_path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"Custom type file {str(file_path)!r} does not exist")
    spec = importlib.util.spec_from_file_location(f"custom_module_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{str(file_path)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Registered so that its classes can be pickled and its dataclasses find their module.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise RuntimeError(f"Error loading module from {str(file_path)!r}: {error}") from error
    if not hasattr(module, type_name):
        raise AttributeError(f"Custom type {type_name!r} is not defined in {str(file_path)!r}")
    return getattr(module, type_name)


def deprecated(replacement: str = "") -> Callable[[Callable], Callable]:
    """Decorator: each call of the function or construction of the class warns (``FutureWarning``)."""

    def decorate(obj: Callable) -> Callable:
        name = f"{obj.__module__}.{obj.__qualname__}"
        advice = f"; use {replacement} instead" if replacement else ""
        message = f"{name} is deprecated{advice}"
        if isinstance(obj, type):
            original_init = obj.__init__

            @functools.wraps(original_init)
            def warning_init(self: Any, *args: Any, **kwargs: Any) -> None:
                warnings.warn(message, category=FutureWarning, stacklevel=2)
                original_init(self, *args, **kwargs)

            obj.__init__ = warning_init
            return obj

        @functools.wraps(obj)
        def warning_call(*args: Any, **kwargs: Any) -> Any:
            warnings.warn(message, category=FutureWarning, stacklevel=2)
            return obj(*args, **kwargs)

        return warning_call

    return decorate
