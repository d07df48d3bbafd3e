"""``metrics.jsonl``: every metric of every step, one JSON object a line, always written.

Each line is flushed before the step ends, so a killed run loses at most the line it was writing. Steps increase
strictly. A resumed run first drops the lines beyond the step it resumes from, the half-written last one too.
"""

from __future__ import annotations

import json
import logging
import math
import numbers
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.utils.fs import write_atomically

logger = logging.getLogger(__name__)

FILE_NAME = "metrics.jsonl"


class MetricsFile:
    """The metrics file of a run folder.

    Args:
        run_dir: the run folder; made if it is not there.
        resume_step: step of the checkpoint the run goes on from; 0 or None for a new run, which moves the file of an
            earlier run in the same folder aside (``metrics.1.jsonl``).
    """

    def __init__(self, run_dir: str | os.PathLike[str], resume_step: int | None = None) -> None:
        self.path = Path(run_dir) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._last_step = -1
        self._last_offset = 0
        if resume_step:
            self._drop_beyond(resume_step)
        elif self.path.exists():
            move_aside(self.path)
        self._file = self.path.open("r+b" if self.path.exists() else "w+b")
        self._file.seek(0, os.SEEK_END)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Append the metrics of a step; a second call for the last step adds to its line.

        Raises:
            ValueError: a step before the last one.
        """
        if step < self._last_step:
            raise ValueError(f"metrics of step {step} came after those of step {self._last_step}")
        values = {key: plain_value(value) for key, value in data.items()}
        if step == self._last_step:
            self._file.seek(self._last_offset)
            values = {**json.loads(self._file.readline()), **values}
            values.pop("step", None)
        else:
            self._last_offset = self._file.seek(0, os.SEEK_END)
        line = json.dumps({"step": step, **values}, ensure_ascii=False) + "\n"
        self._file.seek(self._last_offset)
        self._file.truncate()
        self._file.write(line.encode("utf-8"))
        self._file.flush()
        self._last_step = step

    def close(self) -> None:
        """Close the file; ``log`` cannot be called any more."""
        self._file.close()

    def _drop_beyond(self, step: int) -> None:
        lines, dropped = read_lines(self.path, step)
        if dropped:
            logger.info("%s: dropped %d lines beyond the resumed step %d", self.path, dropped, step)
        kept = [json.dumps(line, ensure_ascii=False) + "\n" for line in lines]
        write_atomically(self.path, "".join(kept))
        if lines:
            self._last_step = int(lines[-1]["step"])
            self._last_offset = sum(len(line.encode("utf-8")) for line in kept[:-1])


def read_lines(path: str | os.PathLike[str], last_step: int | None = None) -> tuple[list[dict[str, Any]], int]:
    """The lines of a metrics file up to a step, and how many are left out (beyond it, or half written)."""
    kept: list[dict[str, Any]] = []
    if not Path(path).exists():
        return kept, 0
    lines, dropped = _parsed(path)
    for line in lines:
        step = int(line["step"])
        if (last_step is not None and step > last_step) or (kept and step <= int(kept[-1]["step"])):
            dropped += 1
        else:
            kept.append(line)
    return kept, dropped


def read_figures(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Every step of a metrics file with what was measured in it, in the order of the steps.

    The lines of a step that was played twice become one, with the later values. Metrics that were not finite are left
    out, and lines that cannot be read, such as the last one of a run that was killed, with a warning.
    """
    lines, broken = _parsed(path)
    if broken:
        logger.warning("%s: %d line(s) cannot be read and are left out", path, broken)
    by_step: dict[int, dict[str, Any]] = {}
    for line in lines:
        figures = {key: value for key, value in line.items() if plain_value(value) is not None}
        by_step.setdefault(int(line["step"]), {}).update(figures)
    return [by_step[step] for step in sorted(by_step)]


def drop_lines_beyond(path: Path, step: int) -> None:
    """Leave in a file of JSON lines those up to a step, however many a step has."""
    kept = [line for line in _parsed(path)[0] if int(line["step"]) <= step]
    write_atomically(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept))


def _parsed(path: str | os.PathLike[str]) -> tuple[list[dict[str, Any]], int]:
    """The lines that can be read and have a step, and how many are not so."""
    lines: list[dict[str, Any]] = []
    broken = 0
    for text in Path(path).read_text(encoding="utf-8", errors="replace").split("\n"):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            int(line["step"])
        except (ValueError, KeyError, TypeError, OverflowError):
            broken += 1
        else:
            lines.append(line)
    return lines, broken


def plain_value(value: Any) -> Any:
    """A metric as JSON holds it: numbers as they are, non-finite ones as null, one-element arrays as their element."""
    if isinstance(value, (bool, str)) or value is None:
        return value
    if not isinstance(value, numbers.Number) and hasattr(value, "item") and getattr(value, "size", 1) in (0, 1):
        value = value.item()
    elif callable(getattr(value, "numel", None)):
        value = value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) or hasattr(value, "tolist"):
        items = value.tolist() if hasattr(value, "tolist") else value
        return [plain_value(item) for item in items]
    return str(value)


def move_aside(path: Path) -> None:
    """Give a file or folder of an earlier run the first free name of ``metrics.1.jsonl``, ``metrics.2.jsonl`` …"""
    number = 1
    while (target := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    os.replace(path, target)
    logger.info("%s of an earlier run in this folder is now %s", path.name, target)
