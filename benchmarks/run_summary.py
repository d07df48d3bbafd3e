"""What finished runs did with their time and memory, side by side.

    python3 -m benchmarks.run_summary RUN_FOLDER [RUN_FOLDER ...]

Each folder holds the ``metrics.jsonl`` of a run. The first training step, which compiles, is shown by itself; the other
figures are means over the steps after it (over all where there is one). The share of the phases is of the step without
validation and checkpoint.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from verl.utils.logger.metrics_file import FILE_NAME, read_figures

logger = logging.getLogger("benchmarks.run_summary")

Steps = list[dict[str, float]]
OCCASIONAL = ("timing_s/testing", "timing_s/save_checkpoint")
PHASES = ("gen", "old_log_prob", "ref", "values", "update_critic", "update_actor", "reward", "adv")


def read_steps(folder: Path) -> Steps:
    """What a run measured in its training steps."""
    return [step for step in read_figures(folder / FILE_NAME) if "timing_s/step" in step]


def mean(steps: Steps, key: str) -> float | None:
    """Mean over the steps that have the metric."""
    values = [step[key] for step in steps if key in step]
    return sum(values) / len(values) if values else None


def step_seconds(step: dict[str, float]) -> float:
    """Seconds of a step without what does not happen in every step."""
    return step["timing_s/step"] - sum(step.get(key, 0.0) for key in OCCASIONAL)


def summary(steps: Steps) -> dict[str, str]:
    """The rows of one run, in reading order."""
    if not steps:
        return {"training steps": "0"}
    warm = steps[1:] or steps
    seconds = sum(map(step_seconds, warm)) / len(warm)
    rows = {"training steps": str(len(steps)), "first step, s": f"{step_seconds(steps[0]):.1f}"}
    rows["step, s"] = f"{seconds:.1f}"
    charged = 0.0
    for phase in PHASES:
        value = mean(warm, f"timing_s/{phase}")
        if value is not None:
            charged += value
            rows[f"  {phase}, s"] = f"{value:.2f} ({value / seconds:.0%})"
    rows["  everything else"] = f"{max(0.0, seconds - charged):.2f} ({max(0.0, 1 - charged / seconds):.1%})"
    for name, key, form in _FIGURES:
        value = mean(warm, key)
        if value is not None:
            rows[name] = form(value)
    for key, value in steps[0].items():
        if key.startswith("startup/"):
            rows[f"start-up, {key.removeprefix('startup/')}, s"] = f"{value:.1f}"
    for key in dict.fromkeys(key for step in warm for key in step if key.startswith("perf/memory_gb/")):
        rows[f"GiB {key.removeprefix('perf/memory_gb/')}"] = f"{mean(warm, key):.1f}"
    for key in sorted({key for step in steps for key in step if key.startswith("val/") and "success" in key}):
        rows[key] = f"{mean(steps, key):.3f}"
    return rows


def _number(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:,.{digits}f}"


_FIGURES = (
    ("rollout, tokens/s", "rollout/tokens_per_second", _number(0)),
    ("rollout, requests", "rollout/requests", _number(0)),
    ("engine idle", "rollout/engine_idle_share", lambda value: f"{value:.1%}"),
    ("waiting for environments alone, s", "rollout/env_wait_s", _number(2)),
    ("weight sync, s", "timing_rollout_s/weight_sync", _number(3)),
    ("… of it weights into the engine", "timing_rollout_s/load_weights", _number(3)),
    ("… of it waking the KV cache", "timing_rollout_s/wake_kv_cache", _number(3)),
    ("engine sleep, s", "timing_rollout_s/engine_sleep", _number(3)),
    ("probe after the sync, mean gap", "rollout/probe_gap_mean", _number(5)),
    ("engine against trainer, mean gap of log-probs", "training/rollout_log_probs_diff_mean", _number(5)),
    ("update, MFU", "perf/mfu/actor", lambda value: f"{value:.1%}"),
    ("largest allocation while training, GiB", "perf/max_memory_allocated_gb", _number(1)),
    ("optimiser step, mean s", "perf/optimizer_step_s/mean", _number(3)),
    ("optimiser step, largest s", "perf/optimizer_step_s/max", _number(3)),
    ("layers recomputed", "perf/recomputed_layers/actor", _number(1)),
    ("device out of memory and tried again", "perf/memory_alloc_retries", _number(1)),
    ("allocations from the device", "perf/memory_device_allocs", _number(0)),
    ("graphs compiled", "perf/compiled_graphs", _number(1)),
    ("… seconds for it", "perf/compile_s", _number(1)),
    ("prompt, tokens", "prompt_length/mean", _number(0)),
    ("answer, tokens", "response_length/mean", _number(0)),
    ("validation, s", "timing_s/testing", _number(1)),
    ("checkpoint, s", "timing_s/save_checkpoint", _number(1)),
    ("grad norm", "actor/grad_norm", _number(4)),
)


def table(columns: dict[str, dict[str, str]]) -> str:
    """Runs as the columns of a Markdown table."""
    names = list(dict.fromkeys(name for rows in columns.values() for name in rows))
    lines = ["| | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    lines += [f"| {name} | " + " | ".join(rows.get(name, "") for rows in columns.values()) + " |" for name in names]
    return "\n".join(lines)


def column_names(folders: Sequence[Path]) -> list[str]:
    """The folders' own names, or all of their paths where two of them would be the same."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="RUN_FOLDER", help=f"with the {FILE_NAME} of a run")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    folders = parse_arguments(arguments).folders
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    found = [Path(folder) for folder in folders if (Path(folder) / FILE_NAME).is_file()]
    missing = [folder for folder in folders if not (Path(folder) / FILE_NAME).is_file()]
    if found:
        names = column_names(found)
        logger.info(table({name: summary(read_steps(folder)) for name, folder in zip(names, found, strict=True)}))
    if missing:
        raise SystemExit(f"no {FILE_NAME} in {', '.join(missing)}")


if __name__ == "__main__":
    main()
