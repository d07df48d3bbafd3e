"""What a run shows of its configuration at its start."""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.trainer.config import compose_config, default_config, prepare_config, to_dataclass
from verl.trainer.config.differences import differences
from verl.trainer.config.prepare import to_yaml, write_resolved


def test_the_defaults_themselves_are_not_shown() -> None:
    (line,) = differences(default_config()).splitlines()
    assert line.startswith("none of ") and "explain=true" in line


def test_changed_and_added_values_have_a_line_below_their_section() -> None:
    given = ["data.max_prompt_length=99", "env.rollout.n=3", "data.seed=1", "+env.rollout.mine=x", "data.shuffle=false",
             "trainer.experiment_name=1e5", "actor_rollout_ref.actor.optim.lr=1e-6"]  # fmt: skip
    first, *lines = differences(default_config(*given)).splitlines()
    assert first.startswith("5 of ")
    assert lines == [
        "  data:", "    max_prompt_length: 99", "    shuffle: false",  # data.seed is 1 anyway, and lengths that follow are left out
        "  trainer:", "    experiment_name: 1e5",
        "  env.rollout:", "    n: 3", "    mine: x",
    ]  # fmt: skip


def test_a_resolved_configuration_shows_what_its_run_showed(tmp_path: Path) -> None:
    config = default_config("preset=embedded", "data.max_prompt_length=99", "trainer.experiment_name=two")
    write_resolved(to_yaml(config), tmp_path)
    again = to_dataclass(compose_config([], tmp_path, "resolved_config"))
    assert differences(again) == differences(config)


def test_a_start_shows_few_lines_and_names_the_file_with_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"prompt": list(range(128))}), tmp_path / "rows.parquet")
    given = ["preset=embedded", "data.train_files=rows.parquet", "data.val_files=rows.parquet", "trainer.run_dir=run"]
    with caplog.at_level(logging.INFO):
        prepare_config(compose_config(given))
    assert "    run_dir: run" in caplog.text and "every value is in run/resolved_config.yaml" in caplog.text
    assert "tokenizer:" not in caplog.text and (tmp_path / "run" / "resolved_config.yaml").is_file()
    assert len(caplog.text.splitlines()) < 90
