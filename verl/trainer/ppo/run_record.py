"""Which run the ``resolved_config.yaml`` of a run folder is of: that of the figures beside it.

A run that begins writes it, and moves that of an earlier run aside as it does with the metrics. A run that goes on
replaces it when its first step is done, an evaluation only where it is another evaluation's.
"""

from __future__ import annotations

from pathlib import Path

from verl.trainer.config import PPOTrainerConfig
from verl.trainer.config.earlier_run import RESOLVED_NAME, recorded_values
from verl.trainer.config.prepare import holds_run, to_yaml, write_resolved
from verl.utils.logger.metrics_file import FILE_NAME, move_aside


def begin_record(config: PPOTrainerConfig, resume_step: int) -> None:
    """Write the configuration of a run that is about to start, unless it would take the place of another run's.

    Args:
        config: with the digest of its tasks.
        resume_step: step of the checkpoint the run goes on from; 0 for one that begins. Its metrics file is not there
            yet, or still an earlier run's.
    """
    run_dir = Path(config.trainer.run_dir).expanduser()
    record = run_dir / f"{RESOLVED_NAME}.yaml"
    if record.exists() and resume_step and holds_run(run_dir):
        evaluations = config.trainer.val_only and recorded_values(record).get("trainer.val_only") is True
        if not evaluations:
            return
    elif record.exists() and (run_dir / FILE_NAME).exists():
        move_aside(record)
    keep_record(config)


def keep_record(config: PPOTrainerConfig) -> None:
    """Write the configuration of a run that has trained a step."""
    write_resolved(to_yaml(config), config.trainer.run_dir)
