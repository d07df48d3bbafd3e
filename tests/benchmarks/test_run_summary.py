"""What the summary of runs makes of damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.run_summary import main, summary


def _run(folder: Path, *seconds: float | None, end: str = "") -> str:
    folder.mkdir(parents=True)
    lines = [{"step": step, "timing_s/step": value, "timing_s/gen": 1.0} for step, value in enumerate(seconds, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + end)
    return str(folder)


def test_damaged_runs_are_summed_up_from_what_can_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runs = [_run(tmp_path / "a", 9.0, 2.0, None, 4.0, end='{"step": 5, "tim'), _run(tmp_path / "b")]
    with caplog.at_level("INFO"):
        main(runs)
    assert "a/metrics.jsonl: 1 line(s) cannot be read" in caplog.text
    assert "| | a | b |" in caplog.text and "| training steps | 3 | 0 |" in caplog.text
    assert "| step, s | 3.0 |  |" in caplog.text


def test_a_folder_without_metrics_is_an_error_and_equal_names_stay_two_columns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs = [_run(tmp_path / name / "run", 1.0, 2.0) for name in ("x", "y")]
    with caplog.at_level("INFO"), pytest.raises(SystemExit, match=f"no metrics.jsonl in {tmp_path}/none"):
        main([*runs, str(tmp_path / "none")])
    assert f"| | {runs[0]} | {runs[1]} |" in caplog.text


def test_memory_is_in_the_order_of_the_step() -> None:
    step = {"timing_s/step": 2.0, "perf/memory_gb/rollout/free": 8.0, "perf/memory_gb/old_log_prob/peak": 70.25}
    rows = [(name, text) for name, text in summary([step]).items() if name.startswith("GiB")]
    assert rows == [("GiB rollout/free", "8.0"), ("GiB old_log_prob/peak", "70.2")]


def test_it_says_how_it_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as asked:
        main(["--help"])
    assert asked.value.code == 0 and "RUN_FOLDER" in capsys.readouterr().out
