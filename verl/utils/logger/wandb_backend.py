"""Weights & Biases as a tracker that never asks and never stops a run.

Without an API key the run is recorded offline, with one line that says so and how to upload it. Whatever the service
does, a failure is one warning; the metrics are in ``metrics.jsonl`` anyway.
"""

from __future__ import annotations

import logging
import netrc
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

logger = logging.getLogger(__name__)

_DEFAULT_HOST = "https://api.wandb.ai"
_INIT_TIMEOUT_S = 60


def has_credentials(environment: Mapping[str, str] | None = None) -> bool:
    """Whether wandb would find an API key: in the environment or in a netrc file."""
    env = os.environ if environment is None else environment
    if env.get("WANDB_API_KEY"):
        return True
    host = urlparse(env.get("WANDB_BASE_URL", _DEFAULT_HOST)).netloc
    path = Path(env.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(str(path)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class WandbLogger:
    """One wandb run.

    Args:
        project: project name.
        name: name of the run.
        config: resolved configuration.
        run_dir: folder for wandb's files unless ``WANDB_DIR`` says otherwise.
        run_id: id of the run to go on with; None = ``WANDB_RUN_ID`` or a new one.
    """

    def __init__(
        self, project: str, name: str, config: Mapping[str, Any] | None, run_dir: str | None, run_id: str | None
    ) -> None:
        self._run: Any = None
        try:
            import wandb
        except ImportError as error:
            logger.warning("wandb is not installed (%s): metrics go to the other trackers only", error)
            return
        self._wandb = wandb
        mode = os.environ.get("WANDB_MODE") or ("online" if has_credentials() else "offline")
        folder = os.environ.get("WANDB_DIR") or run_dir
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
        arguments = dict(
            project=project,
            name=name,
            config=dict(config or {}),
            dir=folder,
            id=run_id or os.environ.get("WANDB_RUN_ID"),
            resume="allow",
        )
        self._run = self._init(arguments, mode)
        if self._run is not None and mode == "offline" and not os.environ.get("WANDB_MODE"):
            logger.warning("wandb: no API key, recording offline; upload with `%s`", self._upload_command())

    @property
    def run_id(self) -> str | None:
        """Id of the run, for resuming; None where there is no run."""
        return None if self._run is None else str(self._run.id)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Log one step; wandb leaves out what it already has of a resumed run."""
        if self._run is None:
            return
        try:
            self._run.log(dict(data), step=step)
        except Exception as error:  # a tracker must not stop a run, whatever it raises
            self._give_up(error)

    def log_table(self, key: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Log a table beside the metrics of a step."""
        if self._run is None:
            return
        try:
            table = self._wandb.Table(columns=list(columns), data=[list(row) for row in rows])
            self._run.log({key: table}, step=step)
        except Exception as error:  # as above
            self._give_up(error)

    def finish(self) -> None:
        """Close the run."""
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as error:  # as above
            self._give_up(error)
        self._run = None

    def _init(self, arguments: dict[str, Any], mode: str) -> Any:
        settings = self._wandb.Settings(silent=True, console="off", init_timeout=_INIT_TIMEOUT_S)
        for attempt in dict.fromkeys((mode, "offline")):
            try:
                return self._wandb.init(**arguments, mode=attempt, settings=settings)
            except Exception as error:  # as above
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                logger.warning("wandb did not start in mode %s: %s", attempt, reason)
        return None

    def _upload_command(self) -> str:
        """What a shell is to run to upload this run.

        Each start of a resumed run has a folder of its own, ``offline-run-<time>-<id>`` or, within one second, ``…-1``.
        With ``--id`` wandb takes several folders in the order of their start.
        """
        if not self._run.dir:
            return "wandb sync"
        run_id = shlex.quote(str(self._run.id))
        folders = shlex.quote(str(Path(self._run.dir).parent.parent / "offline-run-"))
        return f"wandb sync --id {run_id} {folders}*-{run_id}*"

    def _give_up(self, error: Exception) -> None:
        logger.warning("wandb failed and gets no more metrics of this run: %s", error)
        self._run = None
