"""Pairs of runs over several experiments: differences, their error, and how far two runs of one algorithm differ."""

import argparse
import math
import sys
from pathlib import Path

import pytest

from benchmarks.learning_curves import TRAINED, VALIDATED, write_csv
from benchmarks.paired_runs import Span, main, own_deviation, read_curves, table

STEPS = ("training, 1–2", TRAINED, range(1, 3))
CHECK = ("validation, 2", VALIDATED, (2,))


def experiment(**runs: dict[int, float]) -> dict[str, dict[str, dict[int, float]]]:
    return {name: {TRAINED: curve, VALIDATED: {2: curve[2]} if 2 in curve else {}} for name, curve in runs.items()}


def test_pairs_of_a_seed_are_the_sample():
    experiments = {
        "one": experiment(a_seed0={1: 0.5, 2: 0.7}, b_seed0={1: 0.4, 2: 0.6}, a_seed1={1: 0.5}, b_seed2={1: 0.1}),
        "two": experiment(a_seed0={1: 0.5, 2: 0.9}, b_seed0={1: 0.4, 2: 0.6, 3: 0.0}, a_other_seed0={1: 0.0}),
    }
    lines = table(experiments, ("a", "b"), [STEPS, CHECK])
    assert lines[2:4] == ["| one, seed 0 | +10.0 | +10.0 |", "| two, seed 0 | +20.0 | +30.0 |"]
    # mean of 10 and 20 with the error 7.07 / sqrt(2); of 10 and 30 with 14.14 / sqrt(2)
    assert lines[4] == "| mean ± standard error | +15.0 ± 5.0 | +20.0 ± 10.0 |"
    assert lines[5] == "| standard deviation of pairs | 7.1 | 14.1 |"
    assert lines[6] == "| … of two b | 0.0 | 0.0 |"  # both runs of b did the same
    assert len(lines) == 7  # a seed without its other side is no pair, nor is another algorithm's run


def test_a_pair_without_a_common_step_leaves_its_cell_empty():
    experiments = {"one": experiment(a_seed0={1: 0.5, 2: 0.7}, b_seed0={3: 0.4})}
    assert table(experiments, ("a", "b"), [STEPS])[2:5] == [
        "| one, seed 0 | – |",
        "| mean ± standard error | – |",
        "| standard deviation of pairs | – |",
    ]


def test_how_far_a_run_is_from_others_of_its_seed():
    # seed 0: 0.4, 0.6 and 0.8 about 0.6; seed 1: 0.1 and 0.3 about 0.2; seed 2 is alone
    curves = [("0", {1: 0.4}), ("0", {1: 0.6}), ("0", {1: 0.8}), ("1", {1: 0.1}), ("1", {1: 0.3}), ("2", {1: 0.9})]
    pooled = math.sqrt((0.04 + 0 + 0.04 + 0.01 + 0.01) / (2 + 1))
    assert own_deviation(curves, [1]) == pytest.approx(pooled)
    assert own_deviation(curves, [1, 2]) == pytest.approx(pooled)  # over the steps that all have
    assert own_deviation(curves, [5]) is None
    assert own_deviation([("0", {1: 0.4}), ("1", {1: 0.6})], [1]) is None


def test_a_run_too_short_for_the_span_does_not_shorten_it_for_the_others():
    curves = [("0", {1: 0.0, 2: 0.4}), ("0", {1: 0.0, 2: 0.6}), ("0", {0: 0.3})]
    assert own_deviation(curves, [1, 2]) == pytest.approx(math.sqrt((0.05**2 * 2) / 1))


def test_the_command_reads_what_learning_curves_wrote(tmp_path: Path, monkeypatch, caplog):
    for folder, shift in (("first", 0.0), ("second", 0.25)):
        for name, rate in (("gigpo_seed0", 0.5 + shift), ("grpo_seed0", 0.25)):
            run = tmp_path / folder / name
            run.mkdir(parents=True)
            run.joinpath("metrics.jsonl").write_text(f'{{"step": 1, "{TRAINED}": {rate}}}\n')
        write_csv(sorted((tmp_path / folder).iterdir()), tmp_path / folder / "curves.csv")
    assert read_curves(tmp_path / "second" / "curves.csv")["gigpo_seed0"] == {TRAINED: {1: 0.75}, VALIDATED: {}}
    curves = [str(tmp_path / folder / "curves.csv") for folder in ("first", "second")]
    monkeypatch.setattr(sys, "argv", ["paired_runs", *curves, "--compare", "gigpo", "grpo", "--spans", "1-5"])
    with caplog.at_level("INFO"):
        main()
    assert "| second, seed 0 | +50.0 |" in caplog.text
    assert "| mean ± standard error | +37.5 ± 12.5 |" in caplog.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--compare", "gigpo", "ppo"], "no experiment of ['one'] has a pair of runs named gigpo_seed… and ppo_seed…"),
        (["--compare", "gigpo", "grpo", "--spans", "20-11"], "'20-11' is no span of steps, such as 11-20"),
    ],
)
def test_what_cannot_be_compared_is_said(tmp_path: Path, monkeypatch, capsys, options: list[str], said: str):
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "curves.csv").write_text(f"run,step,{VALIDATED},{TRAINED}\ngigpo_seed0,1,,0.5\ngrpo_seed0,1,,0.5\n")
    monkeypatch.setattr(sys, "argv", ["paired_runs", str(folder / "curves.csv"), *options])
    with pytest.raises(SystemExit):
        main()
    assert said in capsys.readouterr().err


def test_another_table_is_refused(tmp_path: Path):
    (tmp_path / "curves.csv").write_text("run,step\n")
    with pytest.raises(ValueError, match=r"lacks the columns \['episode/success_rate', 'val/success_rate'\]"):
        read_curves(tmp_path / "curves.csv")


def test_a_span_has_two_ends():
    assert list(Span.parse("3-5").steps()) == [3, 4, 5]
    with pytest.raises(argparse.ArgumentTypeError):
        Span.parse("3")
