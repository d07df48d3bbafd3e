"""What the learning curves' figures are: paired differences over tasks, means over seeds."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from benchmarks.learning_curves import (
    comparison_table,
    draw,
    gain_table,
    members,
    paired_gain,
    read_metrics,
    seed_means,
    smoothed,
    training_differences,
    training_table,
)


def _run(folder: Path, name: str, validations: dict[int, list[float]]) -> Path:
    run = folder / name
    (run / "validation").mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    for step, values in validations.items():
        content = {"split_digest": "abc", "success_by_task": {f"goal {i}": value for i, value in enumerate(values)}}
        (run / "validation" / f"{step}.json").write_text(json.dumps(content))
    return run


def test_the_gain_and_its_error_are_those_of_paired_differences(tmp_path: Path) -> None:
    run = _run(tmp_path, "gigpo_seed0", {0: [0, 0, 1, 1], 10: [1, 0, 1, 1], 2: [0, 0, 0, 0]})
    tasks, first, last, gain, error = paired_gain(run)
    assert (tasks, first, last, gain) == (4, 0.5, 0.75, 0.25)
    assert error == pytest.approx(math.sqrt((0.75**2 + 3 * 0.25**2) / 3 / 4))  # differences 1, 0, 0, 0


def test_a_run_without_before_and_after_is_shown_without_a_gain(tmp_path: Path) -> None:
    runs = [_run(tmp_path, name, validations) for name, validations in (("a_seed0", {0: [0, 1]}), ("b_seed0", {}))]
    lines = [{"step": step, "episode/success_rate": 0.5, "timing_s/step": 90.0} for step in (1, 2)]
    (runs[0] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [paired_gain(run) for run in runs] == [None, None]
    assert gain_table(runs)[2:] == ["| a_seed0 | – | – | – | – | 3.0 |", "| b_seed0 | – | – | – | – | 0.0 |"]
    assert comparison_table(runs, "a", "b")[2:] == []
    pyplot = pytest.importorskip("matplotlib.pyplot")
    draw(runs, ["a", "b"], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    draw(runs, [], tmp_path / "curves.png")  # of all that could be drawn there is one curve
    axes = pyplot.gcf().axes[0]
    assert [line.get_label() for line in axes.lines] == ["a_seed0, training"]
    assert [list(values) for values in axes.lines[0].get_data()] == [[1, 2], [0.5, 0.5]]


def test_sides_are_means_over_seeds_at_the_steps_that_all_seeds_have(tmp_path: Path) -> None:
    runs = [
        _run(tmp_path, "gigpo_seed0", {0: [0, 0], 10: [1, 1]}),
        _run(tmp_path, "gigpo_seed1", {0: [0, 1]}),
        _run(tmp_path, "grpo_seed0", {0: [0, 0]}),
    ]
    assert seed_means(members(runs, "gigpo")) == {0: {"goal 0": 0.0, "goal 1": 0.5}}
    assert comparison_table(runs, "gigpo", "grpo")[-1] == "| 0 | 25.0% ± 25.0% | 0.0% ± 0.0% | +25.0% ± 25.0% |"
    with pytest.raises(ValueError, match="ppo_seed"):
        members(runs, "ppo")


def test_a_step_that_was_validated_again_after_a_resume_is_one_line(tmp_path: Path) -> None:
    lines = [{"step": 1, "a": 1.0}, {"step": 1, "val/success_rate": 0.5}, {"step": 2, "a": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_metrics(tmp_path) == [{"step": 1, "a": 1.0, "val/success_rate": 0.5}, {"step": 2, "a": 2.0}]


def test_training_is_compared_seed_by_seed_at_the_steps_that_both_have(tmp_path: Path) -> None:
    runs = []
    for name, rates in (("a_seed0", [0.5, 0.75, 1]), ("b_seed0", [0.25, 0.75]), ("a_seed1", [0.5]), ("b_seed2", [0])):
        runs.append(_run(tmp_path, name, {0: [0, 1], 10: [1, 1]}))
        lines = [
            {"step": step, "episode/success_rate": rate, "episode/length/mean": 4 * rate}
            for step, rate in enumerate(rates, 1)
        ]
        (runs[-1] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert training_differences(runs, "a", "b", "episode/success_rate") == {"seed0": [0.25, 0.0]}
    assert training_table(runs, "a", "b")[2:] == ["| seed0 | 2 | +12.5% ± 12.5% | +0.50 ± 0.50 |"]
    pytest.importorskip("matplotlib")
    draw(runs, ["a", "b"], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_smoothing_takes_fewer_neighbours_at_the_ends() -> None:
    assert smoothed([0, 3, 6, 0], width=3) == [1.5, 3, 3, 3]


def test_without_matplotlib_the_numbers_are_named(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    draw([], [], tmp_path / "curves.png")
    assert "pip install matplotlib" in caplog.text and str(tmp_path / "curves.csv") in caplog.text
    assert not list(tmp_path.iterdir())
