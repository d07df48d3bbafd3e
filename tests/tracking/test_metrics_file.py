"""The metrics file: what is on disk after each call, after a kill, and after a resume."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from verl.utils.logger.metrics_file import MetricsFile, plain_value, read_figures, read_lines


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_each_step_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "run")
    for step in range(3):
        file.log({"a": step / 2}, step)
        assert lines(tmp_path / "run")[-1] == {"step": step, "a": step / 2}


def test_steps_increase_and_a_repeated_step_joins_its_line(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.log({"val/score": 1.0}, 0)
    file.log({"a": 2}, 0)
    file.log({"a": 3}, 1)
    assert lines(tmp_path) == [{"step": 0, "val/score": 1.0, "a": 2}, {"step": 1, "a": 3}]
    with pytest.raises(ValueError, match="step 0 came after"):
        file.log({"a": 1}, 0)


def test_a_resumed_run_drops_what_lies_beyond_its_checkpoint(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    for step in range(6):
        file.log({"ä": step}, step)
    file.close()
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as broken:
        broken.write('{"step": 6, "ä"')
    resumed = MetricsFile(tmp_path, resume_step=3)
    resumed.log({"again": 1}, 3)
    resumed.log({"ä": 40}, 4)
    assert lines(tmp_path) == [{"step": 0, "ä": 0}, {"step": 1, "ä": 1}, {"step": 2, "ä": 2},
                               {"step": 3, "ä": 3, "again": 1}, {"step": 4, "ä": 40}]


def test_a_new_run_moves_an_older_file_aside(tmp_path: Path) -> None:
    for run in range(3):
        file = MetricsFile(tmp_path)
        file.log({"run": run}, 0)
        file.close()
    assert lines(tmp_path) == [{"step": 0, "run": 2}]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl"]


def test_a_kill_loses_nothing_that_was_logged(tmp_path: Path) -> None:
    code = (
        "import os, signal; from verl.utils.logger.metrics_file import MetricsFile\n"
        f"file = MetricsFile({str(tmp_path)!r})\n"
        "for step in range(1, 5): file.log({'a': step}, step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], timeout=300, check=False, cwd=Path(__file__).resolve().parents[2])
    assert [line["a"] for line in lines(tmp_path)] == [1, 2, 3, 4]


def test_reading_leaves_out_broken_and_repeated_lines(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 1}\n{"step": 2}\n{"no": 3}\n', encoding="utf-8")
    assert read_lines(path) == ([{"step": 1}, {"step": 2}], 3)
    assert read_lines(tmp_path / "none.jsonl") == ([], 0)


def test_figures_are_one_line_a_step_without_what_was_not_finite(tmp_path: Path, caplog) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1.0, "b": 2}\n\n{"step": 2, "a": null, "b": NaN, "c": "x\u2028y"}\n'
                    '{"step": 1, "a": 3.0}\n{"step": Infinity}\n[]\n{"step": 3, "a"', encoding="utf-8")  # fmt: skip
    assert read_figures(path) == [{"step": 1, "a": 3.0, "b": 2}, {"step": 2, "c": "x\u2028y"}]
    assert f"{path}: 3 line(s) cannot be read" in caplog.text


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (1, 1), (True, True), ("x", "x"), (None, None), (0.5, 0.5), (float("nan"), None), (float("inf"), None),
        (np.float32(0.5), 0.5), (np.int64(3), 3), (np.array(2.0), 2.0), (np.array([1, 2]), [1, 2]),
        (torch.tensor(1.5), 1.5), (torch.tensor([1, 2]), [1, 2]), ({"a": np.float64(1)}, {"a": 1.0}), ((1, 2), [1, 2]),
    ],
)
def test_values_become_json(value, plain) -> None:
    assert plain_value(value) == plain
    json.dumps(plain_value(value), allow_nan=False)
