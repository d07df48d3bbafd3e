"""The console line: one line a step with every number in it."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Mapping
from typing import Any, TextIO

# What tells most about a step, in this order; the other metrics follow as they come.
FIRST = (
    "val/success_rate",
    "episode/success_rate",
    "episode/reward/mean",
    "episode/length/mean",
    "timing_s/step",
    "actor/lr",
    "actor/kl_loss",
    "actor/ppo_kl",
    "actor/grad_norm",
    "actor/entropy_loss",
    "actor/pg_loss",
)


def concat_dict_to_str(metrics: Mapping[str, Any], step: int) -> str:
    """``step:3 - episode/success_rate:0.484 - ...``: every number as ``short_number`` writes it, those of ``FIRST``
    in front, anything else left out."""
    keys = [key for key in FIRST if key in metrics] + [key for key in metrics if key not in FIRST]
    numbers_of = ((key, metrics[key]) for key in keys)
    parts = [f"{key}:{short_number(value)}" for key, value in numbers_of if isinstance(value, numbers.Number)]
    return " - ".join([f"step:{step}", *parts])


def short_number(value: Any) -> str:
    """A number for people: three decimals, or three significant digits where less than 0.01 would read as nothing."""
    number = float(value)
    return f"{number:.3g}" if 0.0 < abs(number) < 1e-2 else f"{number:.3f}"


class LocalLogger:
    """Writes the console line of each step.

    Args:
        remote_logger: kept for callers that pass it; unused.
        enable_wandb: kept for callers that pass it; unused.
        print_to_console: False makes ``log`` a no-op.
        stream: where to write; None = standard output as it is at the time of writing.
    """

    def __init__(
        self,
        remote_logger: Any = None,
        enable_wandb: bool = False,
        print_to_console: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        self._enabled = print_to_console
        self._stream = stream

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Write one line."""
        if self._enabled:
            stream = self._stream or sys.stdout
            stream.write(concat_dict_to_str(data, step) + "\n")
            stream.flush()

    def flush(self) -> None:
        """Nothing is held back."""
