"""Two algorithms over several experiments: pairs of runs with the same seed as the sample.

::

    python -m benchmarks.paired_runs docs/results/*/curves.csv --compare gigpo grpo

Reads what ``benchmarks.learning_curves`` wrote, a ``curves.csv`` an experiment, with runs named ``gigpo_seed0`` and
``grpo_seed0``. A pair is one seed of one experiment; its figure is the difference of the success rates, first minus
second, in training over the steps of a span that both have, and in the validations of a step. The last lines say

* the mean over pairs with its standard error, and the standard deviation of the pairs;
* what that deviation would be if the two algorithms were the same one: √2 times the deviation of a run of the second
  about the mean of all its runs with the same seed (of the pooled variance), as two such runs differ by their sampling
  and rounding alone, and by what experiments differ in.
"""

from __future__ import annotations

import argparse
import csv
import logging
import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.learning_curves import TRAINED, VALIDATED, mean_and_error

logger = logging.getLogger(__name__)

Curve = dict[int, float]  # a share from 0 to 1, by step


class Span(tuple[int, int]):
    """First and last step of a span."""

    @classmethod
    def parse(cls, text: str) -> Span:
        """``11-20``.

        Raises:
            argparse.ArgumentTypeError: it is none.
        """
        first, dash, last = text.partition("-")
        if not (dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise argparse.ArgumentTypeError(f"{text!r} is no span of steps, such as 11-20")
        return cls((int(first), int(last)))

    def steps(self) -> range:
        return range(self[0], self[1] + 1)


def read_curves(path: Path) -> dict[str, dict[str, Curve]]:
    """By run and column, the figures of a ``curves.csv``.

    Raises:
        ValueError: the file lacks a column that is compared.
    """
    runs: dict[str, dict[str, Curve]] = {}
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = {"run", "step", TRAINED, VALIDATED} - set(reader.fieldnames or ())
        if missing:
            raise ValueError(f"{path} lacks the columns {sorted(missing)}; write it with benchmarks.learning_curves")
        for line in reader:
            columns = runs.setdefault(line["run"], {TRAINED: {}, VALIDATED: {}})
            for column, curve in columns.items():
                if line[column]:
                    curve[int(float(line["step"]))] = float(line[column])
    return runs


def mean_difference(ours: Curve, theirs: Curve, steps: Sequence[int]) -> float | None:
    """Mean of first minus second over the steps that both have; None without such a step."""
    both = [step for step in steps if step in ours and step in theirs]
    return sum(ours[step] - theirs[step] for step in both) / len(both) if both else None


def own_deviation(curves: Sequence[tuple[str, Curve]], steps: Sequence[int]) -> float | None:
    """Standard deviation of a run's mean about that of all runs with its seed, pooled over seeds; None where no seed
    has two runs with all ``steps`` that any of the seed's runs was long enough for.

    Args:
        curves: seed and curve of every run of one algorithm.
    """
    squares, freedom = 0.0, 0
    for seed in {seed for seed, _ in curves}:
        group = [curve for name, curve in curves if name == seed and any(step in curve for step in steps)]
        both = [step for step in steps if all(step in curve for curve in group)]
        if len(group) < 2 or not both:
            continue
        means = [sum(curve[step] for step in both) / len(both) for curve in group]
        middle = sum(means) / len(means)
        squares += sum((value - middle) ** 2 for value in means)
        freedom += len(means) - 1
    return math.sqrt(squares / freedom) if freedom else None


def table(
    experiments: dict[str, dict[str, dict[str, Curve]]],
    names: tuple[str, str],
    columns: Sequence[tuple[str, str, Sequence[int]]],
) -> list[str]:
    """A Markdown table with a line a pair, in points.

    Args:
        experiments: by name, runs by name and column.
        names: of the algorithms, as before ``_seed…``.
        columns: title, column of the figures and steps, of each column of the table.

    Raises:
        ValueError: no experiment has a seed of both.
    """
    first, second = (f"{name}_seed" for name in names)
    pairs = [
        (f"{title}, seed {name.removeprefix(first)}", runs[name], runs[name.replace(first, second, 1)])
        for title, runs in experiments.items()
        for name in sorted(runs)
        if name.startswith(first) and name.replace(first, second, 1) in runs
    ]
    if not pairs:
        raise ValueError(f"no experiment of {list(experiments)} has a pair of runs named {first}… and {second}…")
    others = [
        (name.removeprefix(second), curves)
        for runs in experiments.values()
        for name, curves in runs.items()
        if name.startswith(second)
    ]
    heads = (f"{names[0]} - {names[1]}", *(title for title, _, _ in columns))
    found = [[mean_difference(ours[key], theirs[key], steps) for _, key, steps in columns] for _, ours, theirs in pairs]
    rows = [[title, *map(_points, line)] for (title, _, _), line in zip(pairs, found, strict=True)]
    means, deviations, expected = ["mean ± standard error"], ["standard deviation of pairs"], [f"… of two {names[1]}"]
    for place, (_, key, steps) in enumerate(columns):
        values = [line[place] for line in found if line[place] is not None]
        mean, error = mean_and_error(values) if values else (None, None)
        several = len(values) > 1
        means.append(f"{_points(mean)} ± {100 * error:.1f}" if error is not None and several else _points(mean))
        deviations.append(f"{100 * error * math.sqrt(len(values)):.1f}" if error is not None and several else "–")
        own = own_deviation([(seed, curves[key]) for seed, curves in others], steps)
        expected.append("–" if own is None else f"{100 * math.sqrt(2) * own:.1f}")
    lines = [heads, ["---"] * len(heads), *rows, means, deviations, expected]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _points(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:+.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", type=Path, nargs="+", help="a curves.csv an experiment, named by its folder")
    parser.add_argument("--compare", nargs=2, required=True, metavar=("A", "B"), help="names before _seed…")
    parser.add_argument("--spans", type=Span.parse, nargs="*", default=[], help="of training steps, such as 11-20")
    parser.add_argument("--validations", type=int, nargs="*", default=[], help="steps of validations")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    columns = [(f"training, {span[0]}–{span[1]}", TRAINED, span.steps()) for span in args.spans]
    columns += [(f"validation, {step}", VALIDATED, (step,)) for step in args.validations]
    try:
        experiments = {path.parent.name: read_curves(path) for path in args.curves}
        if len(experiments) < len(args.curves):
            raise ValueError(f"experiments are named by the folders of {list(map(str, args.curves))}: name them apart")
        logger.info("\n".join(table(experiments, tuple(args.compare), columns)))
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
