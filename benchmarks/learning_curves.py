"""Tables and a plot of finished runs: learning curves, and the paired gain between first and last validation.

::

    python -m benchmarks.learning_curves RUN_FOLDER [RUN_FOLDER …] --output docs/results/embedded

Writes ``curves.csv`` (one line a run and step), prints a Markdown table, and draws ``curves.png`` where matplotlib is
installed. The gain is the mean over tasks of (last - first success); its standard error is that of paired differences.
"""
from __future__ import annotations

import argparse
import csv
import json
import logging
import math
from pathlib import Path

logger = logging.getLogger(__name__)

COLUMNS = ("val/success_rate", "episode/success_rate", "episode/webshop_task_score (not success_rate)",
           "episode/admissible_action_ratio", "episode/length/mean", "actor/entropy_loss", "timing_s/step")


def read_metrics(run: Path) -> list[dict[str, float]]:
    """Every step's metrics of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def paired_gain(run: Path) -> tuple[int, float, float, float, float]:
    """Tasks, first success, last success, mean difference and its standard error, over the same tasks."""
    files = sorted((run / "validation").glob("*.json"), key=lambda path: int(path.stem))
    first, last = (json.loads(path.read_text())["success_by_task"] for path in (files[0], files[-1]))
    differences = [last[task] - first[task] for task in first]
    count, mean = len(differences), sum(differences) / len(differences)
    variance = sum((value - mean) ** 2 for value in differences) / (count - 1)
    rates = (sum(results.values()) / count for results in (first, last))
    return (count, *rates, mean, math.sqrt(variance / count))


def write_csv(runs: list[Path], target: Path) -> None:
    with target.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "step", *COLUMNS])
        for run in runs:
            for line in read_metrics(run):
                writer.writerow([run.name, line["step"], *(line.get(column, "") for column in COLUMNS)])


def draw(runs: list[Path], target: Path) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        logger.warning("matplotlib is not installed: no plot")
        return
    figure, axes = plt.subplots(figsize=(7, 4))
    for number, run in enumerate(runs):
        lines = read_metrics(run)
        for column, style in (("episode/success_rate", "-"), ("val/success_rate", "o--")):
            points = [(line["step"], line[column]) for line in lines if column in line]
            label = f"{run.name}, {'training' if style == '-' else 'validation'}"
            axes.plot(*zip(*points, strict=True), style, color=f"C{number}", label=label)
    axes.set(xlabel="training step", ylabel="success rate", ylim=(0, 1))
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(target, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args.output.mkdir(parents=True, exist_ok=True)
    write_csv(args.runs, args.output / "curves.csv")
    draw(args.runs, args.output / "curves.png")
    heads = ("run", "tasks", "before", "after", "gain ± standard error", "minutes of steps")
    rows = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for run in args.runs:
        tasks, first, last, gain, error = paired_gain(run)
        minutes = sum(line.get("timing_s/step", 0.0) for line in read_metrics(run)) / 60
        rows.append(f"| {run.name} | {tasks} | {first:.1%} | {last:.1%} | {gain:+.1%} ± {error:.1%} | {minutes:.1f} |")
    logger.info("\n".join(rows))


if __name__ == "__main__":
    main()
