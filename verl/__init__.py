"""The training engine: rows, workers, losses and the trainer loop.

Importing this package is cheap on purpose (neither torch nor Ray): `verl.trainer.config` validates a configuration
before either is needed. ``DataProto`` is therefore loaded on first use.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.protocol import DataProto

__all__ = ["DataProto", "__version__"]

__version__ = (Path(__file__).parent / "version" / "version").read_text(encoding="utf-8").strip()


def _use_modelscope_hub() -> None:
    """Let Hugging Face downloads go to ModelScope (``VERL_USE_MODELSCOPE=true``)."""
    try:
        from modelscope.utils.hf_util import patch_hub
    except ImportError as error:
        raise ImportError(
            "VERL_USE_MODELSCOPE is set but the package 'modelscope' is missing; "
            "install it with `pip install modelscope` or unset the variable"
        ) from error
    patch_hub()


if os.environ.get("VERL_USE_MODELSCOPE", "false").lower() == "true":
    _use_modelscope_hub()


def __getattr__(name: str) -> Any:
    if name == "DataProto":
        from verl.protocol import DataProto

        return DataProto
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
