"""Tables and a plot of finished runs: learning curves, and the paired gain between first and last validation.

::

    python -m benchmarks.learning_curves RUN_FOLDER [RUN_FOLDER …] --output docs/results/embedded
    python -m benchmarks.learning_curves outputs/smollm2/*_seed? --compare gigpo grpo --output docs/results/smollm2

Writes ``curves.csv`` (one line a run and step), prints Markdown tables, and draws ``curves.png`` where matplotlib is
installed. The gain is the mean over tasks of (last - first success); its standard error is that of paired differences.

``--compare A B`` sets the runs named ``A_seed…`` against those named ``B_seed…``. A task's success is then its mean
over the seeds, and tasks are the sample: the standard error of a curve, and of the difference of two at the same step,
is that of the mean over tasks. Runs of a seed train on the same tasks at the same step, so what they do in training is
compared seed by seed, with steps as the sample; how far seeds differ from each other is not in that error.
"""
from __future__ import annotations

import argparse
import csv
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.utils.logger.metrics_file import FILE_NAME, read_figures

logger = logging.getLogger(__name__)

COLUMNS = ("val/success_rate", "episode/success_rate", "episode/webshop_task_score (not success_rate)",
           "episode/valid_action_ratio", "episode/admissible_action_ratio", "episode/length/mean",
           "actor/entropy_loss", "timing_s/step")
VALIDATED, TRAINED = "val/success_rate", "episode/success_rate"
LENGTH = "episode/length/mean"
WINDOW = 5  # steps over which the training curves of a comparison are averaged
Successes = dict[str, float]  # of the validation tasks, by name


def read_validations(run: Path) -> dict[int, Successes]:
    """Success by task of every validation, by step."""
    return {step: content["success_by_task"] for step, content in _validations(run).items()}


def split_digests(runs: Sequence[Path]) -> set[str]:
    """The digests of the task splits that the runs were validated on."""
    return {str(content["split_digest"]) for run in runs for content in _validations(run).values()}


def _validations(run: Path) -> dict[int, dict[str, Any]]:
    """What ``validation/`` holds, by step.

    Raises:
        ValueError: a file that cannot be read, or without success by task.
    """
    found = {}
    for path in (run / "validation").glob("*.json"):
        if not path.stem.isdigit():
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            successes = content["success_by_task"].values()
            complete = bool(successes) and all(map(math.isfinite, successes)) and "split_digest" in content
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} cannot be read ({error}); remove it, or repeat that validation") from error
        if not complete:
            raise ValueError(f"{path} lists no task, or one without success; remove it, or repeat that validation")
        found[int(path.stem)] = content
    return dict(sorted(found.items()))


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and its standard error from the sample's variance."""
    count, mean = len(values), sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / max(count - 1, 1)
    return mean, math.sqrt(variance / count)


def paired_gain(run: Path) -> tuple[int, float, float, float, float] | None:
    """Tasks, first success, last success, mean difference and its standard error, over the same tasks; None for a run
    that was validated less than twice, which has no before and after."""
    validations = list(read_validations(run).values())
    if len(validations) < 2:
        return None
    first, last = validations[0], validations[-1]
    rates = (sum(results.values()) / len(results) for results in (first, last))
    return (len(first), *rates, *mean_and_error([last[task] - first[task] for task in first]))


def seed_means(runs: Sequence[Path]) -> dict[int, Successes]:
    """By step, each task's mean success over the runs; steps that all runs validated."""
    every = [read_validations(run) for run in runs]
    steps = sorted(set.intersection(*(set(validations) for validations in every)))
    return {
        step: {task: sum(run[step][task] for run in every) / len(every) for task in every[0][step]} for step in steps
    }


def members(runs: Sequence[Path], name: str) -> list[Path]:
    """The runs of one side of a comparison.

    Raises:
        ValueError: there is none.
    """
    found = [run for run in runs if run.name.startswith(f"{name}_seed")]
    if not found:
        raise ValueError(f"--compare {name}: no run folder is named {name}_seed…, there are {[r.name for r in runs]}")
    return found


def check_tasks(runs: Sequence[Path]) -> None:
    """Whether all validations of the runs are of the same tasks, as what compares them task by task needs.

    Raises:
        ValueError: there are two of different tasks.
    """
    validations = ((run, step, set(tasks)) for run in runs for step, tasks in read_validations(run).items())
    places = {run / "validation" / f"{step}.json": tasks for run, step, tasks in validations}
    for place, tasks in places.items():
        first, expected = next(iter(places.items()))
        if tasks != expected:
            raise ValueError(
                f"{place} is of other tasks than {first} ({len(tasks)} and {len(expected)}): what is compared task by "
                "task needs the same ones; remove the file, or leave out its run"
            )


def training_curve(run: Path, column: str = TRAINED) -> dict[int, float]:
    """A figure by step, that of the training episodes if none is named."""
    return {int(line["step"]): line[column] for line in read_figures(run / FILE_NAME) if column in line}


def smoothed(values: Sequence[float], width: int = WINDOW) -> list[float]:
    """Means over ``width`` neighbours, over fewer at the ends."""
    reach = width // 2
    windows = [values[max(0, place - reach) : place + reach + 1] for place in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def training_differences(runs: Sequence[Path], first: str, second: str, column: str) -> dict[str, list[float]]:
    """First minus second at every step that both have trained, by what follows the name of a run."""
    found = {}
    for run in members(runs, first):
        seed = run.name.removeprefix(f"{first}_")
        other = run.with_name(f"{second}_{seed}")
        if other in runs:
            ours, theirs = training_curve(run, column), training_curve(other, column)
            found[seed] = [ours[step] - theirs[step] for step in sorted(set(ours) & set(theirs))]
    return {seed: differences for seed, differences in found.items() if len(differences) > 1}


def write_csv(runs: Sequence[Path], target: Path) -> None:
    with target.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "step", *COLUMNS, "val/standard_error"])
        for run in runs:
            validations = read_validations(run)
            for line in read_figures(run / FILE_NAME):
                results = validations.get(int(line["step"])) if VALIDATED in line else None
                error = mean_and_error(list(results.values()))[1] if results else ""
                writer.writerow([run.name, line["step"], *(line.get(column, "") for column in COLUMNS), error])


def draw(runs: Sequence[Path], compared: Sequence[str], target: Path) -> None:
    """Draw ``target``; without matplotlib a warning says what to do."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        table = target.with_suffix(".csv")
        logger.warning("%s is not drawn: `pip install matplotlib` and repeat; the numbers are in %s", target, table)
        return
    size = (10, 4) if compared else (7, 4)
    figure, panels = plt.subplots(1, 2 if compared else 1, figsize=size, sharey=True, squeeze=False)
    if compared:
        for number, name in enumerate(compared):
            _draw_side(panels[0], members(runs, name), name, f"C{number}", shift=0.3 * (number - 0.5))
    else:
        for number, run in enumerate(runs):
            for column, style, what in ((TRAINED, "-", "training"), (VALIDATED, "o--", "validation")):
                curve = training_curve(run, column)
                if curve:  # a format without points is drawn as if it were one
                    steps, rates = zip(*curve.items(), strict=True)
                    panels[0][0].plot(steps, rates, style, color=f"C{number}", label=f"{run.name}, {what}")
    for axes in panels[0]:
        axes.set(xlabel="training step", ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="lower right")
    panels[0][0].set(ylabel="success rate")
    figure.tight_layout()
    figure.savefig(target, dpi=130)


def _draw_side(panels: Sequence[Any], runs: Sequence[Path], name: str, colour: str, shift: float) -> None:
    """One side of a comparison: training on the left, validation on the right.

    ``shift`` moves the validations along the axis of steps, so that equal ones do not hide each other.
    """
    training, validation = panels
    every = [training_curve(run) for run in runs]
    steps = sorted(set.intersection(*(set(successes) for successes in every)))
    curves = [smoothed([successes[step] for step in steps]) for successes in every]
    middle = [sum(values) / len(values) for values in zip(*curves, strict=True)]
    label = f"{name}: mean of {len(runs)} seeds over {WINDOW} steps; band: the seeds"
    training.plot(steps, middle, color=colour, label=label)
    edges = ([edge(values) for values in zip(*curves, strict=True)] for edge in (min, max))
    training.fill_between(steps, *edges, color=colour, alpha=0.2, linewidth=0)
    training.set(title="training episodes")
    for run in runs:
        rates = {step: mean_and_error(list(results.values()))[0] for step, results in read_validations(run).items()}
        validation.plot([step + shift for step in rates], list(rates.values()), ".", color=colour, alpha=0.5)
    validations = seed_means(runs)
    figures = [mean_and_error(list(results.values())) for results in validations.values()]
    validation.errorbar(
        [step + shift for step in validations], [mean for mean, _ in figures], [error for _, error in figures],
        fmt="o-", color=colour, capsize=3, label=f"{name}: mean ± standard error; dots: each seed",
    )  # fmt: skip
    validation.set(title="validation tasks")


def gain_table(runs: Sequence[Path]) -> list[str]:
    """Each run before and after."""
    heads = ("run", "tasks", "before", "after", "gain ± standard error", "minutes of steps")
    rows = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for run in runs:
        minutes = sum(line.get("timing_s/step", 0.0) for line in read_figures(run / FILE_NAME)) / 60
        found = paired_gain(run)
        shown = "– | – | – | –"
        if found is not None:
            tasks, first, last, gain, error = found
            shown = f"{tasks} | {first:.1%} | {last:.1%} | {gain:+.1%} ± {error:.1%}"
        rows.append(f"| {run.name} | {shown} | {minutes:.1f} |")
    return rows


def comparison_table(runs: Sequence[Path], first: str, second: str) -> list[str]:
    """Both sides and their paired difference at every step that all runs validated."""
    ours, theirs = (seed_means(members(runs, name)) for name in (first, second))
    heads = ("step", first, second, f"{first} - {second} ± standard error")
    rows = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for step in sorted(set(ours) & set(theirs)):
        sides = (mean_and_error(list(side[step].values())) for side in (ours, theirs))
        shown = " | ".join(f"{mean:.1%} ± {error:.1%}" for mean, error in sides)
        mean, error = mean_and_error([ours[step][task] - theirs[step][task] for task in ours[step]])
        rows.append(f"| {step} | {shown} | {mean:+.1%} ± {error:.1%} |")
    return rows


def training_table(runs: Sequence[Path], first: str, second: str) -> list[str]:
    """Differences of success and length of the training episodes, seed by seed."""
    successes, lengths = (training_differences(runs, first, second, column) for column in (TRAINED, LENGTH))
    heads = (f"{first} - {second} in training", "steps", "success rate ± standard error", "episode length")
    rows = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for seed, differences in successes.items():
        if seed not in lengths:
            continue
        (success, error), (length, spread) = mean_and_error(differences), mean_and_error(lengths[seed])
        rows.append(f"| {seed} | {len(differences)} | {success:+.1%} ± {error:.1%} | {length:+.2f} ± {spread:.2f} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--compare", nargs=2, default=(), metavar=("A", "B"), help="names before _seed…")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for run in args.runs:
        if not (run / FILE_NAME).is_file():
            parser.error(f"{run} is no run folder: it holds no {FILE_NAME}")
    runs = list(dict.fromkeys(run.resolve() for run in args.runs))
    try:
        for run in runs:
            check_tasks([run])
        check_tasks([run for name in args.compare for run in members(runs, name)])
        tables = ["", *gain_table(runs)]
        if args.compare:
            tables += ["", *comparison_table(runs, *args.compare), "", *training_table(runs, *args.compare)]
    except ValueError as error:
        parser.error(str(error))
    args.output.mkdir(parents=True, exist_ok=True)
    write_csv(runs, args.output / "curves.csv")
    draw(runs, args.compare, args.output / "curves.png")
    logger.info("\n".join([*tables, "", f"split: {', '.join(sorted(split_digests(runs)))}"]))


if __name__ == "__main__":
    main()
