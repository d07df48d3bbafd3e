"""The configuration in a run folder is that of the figures beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.data_preprocess import prepare
from verl.trainer.config import compose_config, prepare_config
from verl.trainer.config.earlier_run import recorded_values
from verl.trainer.config.schema import PPOTrainerConfig
from verl.trainer.ppo.run_record import begin_record, keep_record

LR = "actor_rollout_ref.actor.optim.lr"


@pytest.fixture
def start(tmp_path: Path):
    """A start in the one run folder with a learning rate, up to where it would look for a checkpoint."""
    sizes = ["--train_data_size", "8", "--val_data_size", "2"]
    assert prepare.main(["--mode", "text", "--local_dir", str(tmp_path), *sizes]) == 0
    data = [f"data.{key}_files={tmp_path}/text/{name}.parquet" for key, name in (("train", "train"), ("val", "test"))]
    runnable = ["preset=embedded", "env.env_name=Webshop", *data]

    def start(rate: float, *overrides: str) -> PPOTrainerConfig:
        return prepare_config(compose_config([*runnable, f"trainer.run_dir={tmp_path}/run", f"{LR}={rate}", *overrides]))

    return start


@pytest.fixture
def folder(tmp_path: Path, start) -> Path:
    """Of a run with learning rate 0.1 that trained five steps."""
    config = start(0.1)
    begin_record(config, 0)
    keep_record(config)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 5}\n')
    return tmp_path / "run"


def recorded(folder: Path, name: str = "resolved_config.yaml") -> float:
    return recorded_values(folder / name)[LR]


def test_a_run_that_begins_is_recorded_before_it_has_figures(tmp_path: Path, start) -> None:
    start(0.1)
    assert recorded(tmp_path / "run") == 0.1
    begin_record(start(0.2), 0)  # the first one failed before it had any
    assert recorded(tmp_path / "run") == 0.2
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["resolved_config.yaml"]


def test_a_start_that_trains_nothing_leaves_the_record(folder: Path, start) -> None:
    config = start(0.2)
    assert recorded(folder) == 0.1
    begin_record(config, 5)
    assert recorded(folder) == 0.1
    keep_record(config)  # now a step is done
    assert recorded(folder) == 0.2


def test_a_checkpoint_is_of_a_run_too(folder: Path, start) -> None:
    (folder / "metrics.jsonl").unlink()
    (folder / "global_step_5").mkdir()
    begin_record(start(0.2), 5)
    assert recorded(folder) == 0.1


def test_a_run_that_starts_anew_moves_the_record_aside_with_the_metrics(folder: Path, start) -> None:
    begin_record(start(0.2), 0)
    assert (recorded(folder), recorded(folder, "resolved_config.1.yaml")) == (0.2, 0.1)


def test_an_evaluation_takes_the_place_of_another_one_alone(folder: Path, start, tmp_path: Path) -> None:
    begin_record(start(0.2, "trainer.val_only=true"), 5)
    assert recorded(folder) == 0.1
    elsewhere = f"trainer.run_dir={tmp_path}/eval"
    begin_record(start(0.2, "trainer.val_only=true", elsewhere), 5)
    (tmp_path / "eval" / "metrics.jsonl").write_text('{"step": 5}\n')
    begin_record(start(0.3, "trainer.val_only=true", elsewhere), 5)
    assert recorded(tmp_path / "eval") == 0.3
