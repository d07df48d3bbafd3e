"""The other trackers behind one face: ``log(data, step)``, ``finish()``.

TensorBoard comes with the project. The rest are adapters for packages that a user may have installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import numbers
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

PACKAGES = {
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "clearml": "clearml",
    "vemlp_wandb": "volcengine_ml_platform",
}


class Backend(Protocol):
    """What a tracker can do."""

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Log the metrics of one step."""

    def finish(self) -> None:
        """Write what is held back and close."""


def require(name: str) -> ModuleType:
    """The package of a tracker.

    Raises:
        ValueError: it is not installed.
    """
    package = PACKAGES[name]
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"trainer.logger has {name}, but the package {package} is not installed: "
            f"pip install {package.replace('_', '-')}, or leave it out of trainer.logger"
        )
    return importlib.import_module(package)


def scalars(data: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among the metrics."""
    return {key: float(value) for key, value in data.items() if isinstance(value, numbers.Number)}


class TensorboardLogger:
    """Event files in ``TENSORBOARD_DIR`` or the run folder's ``tensorboard``."""

    def __init__(self, run_dir: str | None, resume_step: int | None) -> None:
        require("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(os.environ.get("TENSORBOARD_DIR") or Path(run_dir or ".") / "tensorboard")
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1 if resume_step else None, flush_secs=10)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        for key, value in scalars(data).items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class MlflowLogger:
    """One MLflow run; parameters are the resolved configuration, flattened."""

    def __init__(self, project: str, name: str, config: Mapping[str, Any] | None) -> None:
        self._mlflow = require("mlflow")
        if os.environ.get("MLFLOW_TRACKING_URI"):
            self._mlflow.set_tracking_uri(os.environ["MLFLOW_TRACKING_URI"])
        self._mlflow.set_experiment(project)
        self._mlflow.start_run(run_name=name)
        self._mlflow.log_params(flatten(config or {}))

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self._mlflow.log_metrics({key.replace("@", "_at_"): value for key, value in scalars(data).items()}, step=step)

    def finish(self) -> None:
        self._mlflow.end_run()


class SwanlabLogger:
    """One SwanLab run."""

    def __init__(self, project: str, name: str, config: Mapping[str, Any] | None, run_dir: str | None) -> None:
        self._swanlab = require("swanlab")
        mode = os.environ.get("SWANLAB_MODE") or ("cloud" if os.environ.get("SWANLAB_API_KEY") else "local")
        folder = os.environ.get("SWANLAB_LOG_DIR") or str(Path(run_dir or ".") / "swanlog")
        self._swanlab.init(project=project, experiment_name=name, config=dict(config or {}), logdir=folder, mode=mode)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self._swanlab.log(scalars(data), step=step)

    def finish(self) -> None:
        self._swanlab.finish()


class ClearMLLogger:
    """One ClearML task; ``group/name`` becomes title and series."""

    def __init__(self, project: str, name: str, config: Mapping[str, Any] | None) -> None:
        clearml = require("clearml")
        self._task = clearml.Task.init(project_name=project, task_name=name, continue_last_task=True, output_uri=False)
        self._task.connect_configuration(dict(config or {}), name="resolved_config")

    def log(self, data: Mapping[str, Any], step: int) -> None:
        report = self._task.get_logger()
        for key, value in scalars(data).items():
            title, _, series = key.partition("/")
            report.report_scalar(title=title, series=series or title, value=value, iteration=step)

    def finish(self) -> None:
        self._task.close()


class VemlpWandbLogger:
    """Volcano Engine's wandb-like tracker; needs VOLC_ACCESS_KEY_ID, VOLC_SECRET_ACCESS_KEY, MLP_TRACKING_REGION."""

    def __init__(self, project: str, name: str, config: Mapping[str, Any] | None) -> None:
        platform = require("vemlp_wandb")
        missing = [
            key
            for key in ("VOLC_ACCESS_KEY_ID", "VOLC_SECRET_ACCESS_KEY", "MLP_TRACKING_REGION")
            if not os.environ.get(key)
        ]
        if missing:
            raise ValueError(f"trainer.logger has vemlp_wandb, which needs {', '.join(missing)} in the environment")
        platform.init(
            ak=os.environ["VOLC_ACCESS_KEY_ID"],
            sk=os.environ["VOLC_SECRET_ACCESS_KEY"],
            region=os.environ["MLP_TRACKING_REGION"],
        )
        self._wandb = importlib.import_module("volcengine_ml_platform.wandb")
        self._wandb.init(project=project, name=name, config=dict(config or {}), sync_tensorboard=True)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self._wandb.log(scalars(data), step=step)

    def finish(self) -> None:
        self._wandb.finish()


def flatten(config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """A nested configuration with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, name))
        else:
            flat[name] = value
    return flat
