"""What the learning curves' figures are: paired differences over tasks, means over seeds."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path

import pytest

from benchmarks.learning_curves import (
    comparison_table,
    draw,
    gain_table,
    main,
    members,
    paired_gain,
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


def _tables(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["learning_curves", *arguments])
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    main()


def test_a_damaged_metrics_file_gives_what_can_be_read_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = _run(tmp_path, "a_seed0", {0: [0, 0], 2: [0, 1]})
    lines = [
        {"step": 1, "timing_s/step": 60.0, "episode/success_rate": 0.25},
        {"step": 2, "timing_s/step": None, "episode/success_rate": float("nan")},
        {"step": 1, "timing_s/step": 120.0},  # played again
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "timi')
    with caplog.at_level("INFO"):
        _tables([str(run), f"{run}/", "--output", str(tmp_path / "out")], monkeypatch)
    assert "metrics.jsonl: 1 line(s) cannot be read" in caplog.text
    assert caplog.text.count("| a_seed0 | 2 | 0.0% | 50.0% | +50.0% ± 50.0% | 2.0 |") == 1  # a run given twice is one
    rows = list(csv.DictReader((tmp_path / "out" / "curves.csv").open()))
    assert [(row["step"], row["episode/success_rate"], row["timing_s/step"]) for row in rows] == [
        ("1", "0.25", "120.0"), ("2", "", "")
    ]  # fmt: skip


def test_what_cannot_be_compared_is_named_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    runs = [_run(tmp_path, "a_seed0", {0: [0, 1], 5: [0, 1]}), _run(tmp_path, "b_seed0", {0: [0, 1, 1]})]
    (runs[0] / "validation" / "notes.json").touch()
    given = [*map(str, runs), "--output", str(tmp_path / "out")]
    _tables(given, monkeypatch)  # each run against its own beginning

    def refusal(*arguments: str) -> str:
        with pytest.raises(SystemExit, match="2"):
            _tables([*given, *arguments], monkeypatch)
        return capsys.readouterr().err

    assert "b_seed0/validation/0.json is of other tasks than" in refusal("--compare", "a", "b")
    assert "no run folder is named c_seed" in refusal("--compare", "a", "c")
    last = runs[0] / "validation" / "5.json"
    for text, said in (
        ('{"split_di', "cannot be read"),
        ('{"success_by_task": [1], "split_digest": "a"}', "cannot be read"),
        ('{"success_by_task": {}, "split_digest": "a"}', "lists no task"),
        ('{"success_by_task": {"goal 0": NaN, "goal 1": 1}, "split_digest": "a"}', "lists no task, or one without"),
        ('{"success_by_task": {"goal 0": 1}, "split_digest": "a"}', "is of other tasks than"),
    ):
        last.write_text(text)
        assert f"a_seed0/validation/5.json {said}" in refusal()


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
