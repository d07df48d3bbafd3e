"""Tracking of a run: one call a step, every tracker and the metrics file get it.

``Tracking.for_run(config)`` is what the trainer uses; the constructor keeps the signature users know.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.trainer.config.names import TRACKERS
from verl.trainer.config.schema import PPOTrainerConfig
from verl.utils.logger.aggregate_logger import LocalLogger
from verl.utils.logger.backends import (
    ClearMLLogger,
    MlflowLogger,
    SwanlabLogger,
    TensorboardLogger,
    VemlpWandbLogger,
)
from verl.utils.logger.metrics_file import MetricsFile
from verl.utils.logger.wandb_backend import WandbLogger

logger = logging.getLogger(__name__)

__all__ = ["Tracking", "ValidationGenerationsLogger", "import_packages"]

_NAMED_LIKE_THEIR_PACKAGE = ("wandb", "mlflow", "swanlab", "clearml")
GENERATIONS_FILE = "generations.jsonl"
GENERATION_COLUMNS = ("step", "input", "output", "score")


class Tracking:
    """The trackers of one run.

    Args:
        project_name: project of the trackers.
        experiment_name: name of the run.
        default_backend: name or names out of ``supported_backend``.
        config: resolved configuration as plain values.
        run_dir: run folder, which gets ``metrics.jsonl``; None = no such file.
        resume_step: step the run goes on from; 0 or None for a new run.
        state: what :meth:`state_dict` of the interrupted run gave.

    Raises:
        ValueError: an unknown tracker, or one whose package is not installed.
    """

    supported_backend = list(TRACKERS)

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | Sequence[str] = "console",
        config: Mapping[str, Any] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        resume_step: int | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        names = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        for name in names:
            if name not in self.supported_backend:
                raise ValueError(f"trainer.logger has {name!r}; there are {', '.join(self.supported_backend)}")
        folder = None if run_dir is None else str(Path(run_dir).expanduser())
        self.logger: dict[str, Any] = {}
        self._file = MetricsFile(folder, resume_step) if folder is not None else None
        self._generations = ValidationGenerationsLogger(folder)
        for name in dict.fromkeys(names):
            self.logger[name] = _make_backend(
                name, project_name, experiment_name, config, folder, resume_step, dict(state or {})
            )

    @classmethod
    def for_run(
        cls, config: PPOTrainerConfig, resume_step: int | None = None, state: Mapping[str, Any] | None = None
    ) -> Tracking:
        """The trackers that a configuration asks for."""
        trainer = config.trainer
        return cls(
            trainer.project_name,
            trainer.experiment_name,
            trainer.logger,
            config=config.to_dict(),
            run_dir=trainer.run_dir,
            resume_step=resume_step,
            state=state,
        )

    def log(self, data: Mapping[str, Any], step: int, backend: str | Sequence[str] | None = None) -> None:
        """Log the metrics of a step.

        Args:
            data: metric names and values.
            step: training step; must not go back.
            backend: log to these trackers only; None = to all and to the metrics file.
        """
        chosen = [backend] if isinstance(backend, str) else backend
        if self._file is not None and chosen is None:
            self._file.log(data, step)
        for name, one in self.logger.items():
            if chosen is None or name in chosen:
                one.log(data=data, step=step)

    def log_generations(self, samples: Sequence[Any], step: int) -> None:
        """Log sampled generations of a validation; see :class:`ValidationGenerationsLogger`."""
        self._generations.log(self.logger, samples, step)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to keep so that a resumed run goes on in the same tracker runs."""
        wandb = self.logger.get("wandb")
        return {"wandb_run_id": wandb.run_id} if wandb is not None and wandb.run_id else {}

    def finish(self) -> None:
        """Close everything; safe to call twice."""
        for one in self.logger.values():
            if hasattr(one, "finish"):
                one.finish()
        self.logger = {}
        if self._file is not None:
            self._file.close()
            self._file = None


class ValidationGenerationsLogger:
    """Sampled generations: a table in wandb under ``val/generations`` and a line each in ``generations.jsonl``.

    Args:
        run_dir: run folder; None = no file.
    """

    def __init__(self, run_dir: str | os.PathLike[str] | None = None) -> None:
        self._path = None if run_dir is None else Path(run_dir) / GENERATIONS_FILE
        self._rows: list[list[Any]] = []

    def log(self, loggers: Mapping[str, Any], samples: Sequence[Any], step: int) -> None:
        """Log samples.

        Args:
            loggers: trackers by name; those that know tables get one with all samples so far.
            samples: ``(input, output, score)`` each, or objects with ``prompt``, ``response`` and ``score``.
            step: training step.
        """
        rows = [[step, *_sample_values(sample)] for sample in samples]
        if not rows:
            return
        self._rows.extend(rows)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                for row in rows:
                    file.write(json.dumps(dict(zip(GENERATION_COLUMNS, row)), ensure_ascii=False) + "\n")
        for one in loggers.values():
            if hasattr(one, "log_table"):
                one.log_table("val/generations", GENERATION_COLUMNS, self._rows, step)


def _sample_values(sample: Any) -> tuple[str, str, float]:
    if isinstance(sample, (tuple, list)):
        prompt, response, score = sample
    else:
        prompt, response, score = sample.prompt, sample.response, sample.score
    return str(prompt), str(response), float(score)


def import_packages(backends: str | Sequence[str]) -> None:
    """Import the packages of trackers ahead of time; what cannot be imported is reported when its tracker starts."""
    for name in [backends] if isinstance(backends, str) else backends:
        if name in _NAMED_LIKE_THEIR_PACKAGE:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def _make_backend(
    name: str,
    project: str,
    experiment: str,
    config: Mapping[str, Any] | None,
    run_dir: str | None,
    resume_step: int | None,
    state: Mapping[str, Any],
) -> Any:
    if name == "console":
        return LocalLogger()
    if name == "wandb":
        return WandbLogger(project, experiment, config, run_dir, state.get("wandb_run_id"))
    if name == "tensorboard":
        return TensorboardLogger(run_dir, resume_step)
    if name == "mlflow":
        return MlflowLogger(project, experiment, config)
    if name == "swanlab":
        return SwanlabLogger(project, experiment, config, run_dir)
    if name == "clearml":
        return ClearMLLogger(project, experiment, config)
    return VemlpWandbLogger(project, experiment, config)
