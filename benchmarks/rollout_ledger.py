"""Where the seconds of a rollout benchmark went, and how fast any loop over the same episodes could be.

    python3 -m benchmarks.rollout --event 16:2 --out rollout.json
    python3 -m benchmarks.rollout_ledger rollout.json            # the trace that the benchmark drew
    python3 -m benchmarks.rollout_ledger rollout.json --trace trace.json   # the one that it was given

The report holds the time of single decode steps at some batch sizes; a line through them says what a step costs by
itself and what each running request adds. With the steps an arm took, that divides its seconds into

* steps: ``fixed cost of a step * steps``,
* requests: ``cost of a running request * sum over steps of the requests that run``,
* idle: no engine step ran,
* prompts: the rest, which is reading prompts, attending to long contexts, and what the line does not fit.

A turn's prompt is known only after the turn before, so a loop needs at least as many steps as the episode with the most
answer tokens has. The floor is that many steps, with the requests of the trace, never idle, and with prompts at the
least that an arm of the report spent on them. Steps and requests are a limit at this cost of a step; the prompts are
what was reached, not a limit. No arm that plays the episodes turn by turn lies below the floor.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.rollout_trace import Trace

logger = logging.getLogger("benchmarks.rollout_ledger")

TAILS = (64, 32, 16)  # fewer episodes than that: the tail


class StepCost(NamedTuple):
    """Seconds of a decode step: ``fixed + per_request * requests``."""

    fixed: float
    per_request: float


class Account(NamedTuple):
    """An arm's seconds."""

    arm: str
    seconds: float
    engine_steps: int
    steps: float
    requests: float
    idle: float

    @property
    def prompts(self) -> float:
        return self.seconds - self.steps - self.requests - self.idle


def step_cost(steps: Sequence[Mapping[str, float]]) -> StepCost:
    """Least squares through the report's decode steps.

    Raises:
        ValueError: fewer than two batch sizes were timed, or larger ones took less time.
    """
    if len({step["batch"] for step in steps}) < 2:
        raise ValueError("the report has decode steps of fewer than two batch sizes; set --step-batches 16 64 128")
    slope, intercept = np.polyfit([step["batch"] for step in steps], [step["decode_ms"] for step in steps], 1)
    if slope < 0:
        raise ValueError(
            "the report's decode steps get faster with more requests, as on a busy machine: nothing can be divided by "
            "them; repeat the benchmark, with batch sizes further apart (--step-batches)"
        )
    return StepCost(float(intercept) / 1000, float(slope) / 1000)


def chains(trace: Trace) -> list[int]:
    """Answer tokens of every episode."""
    return [sum(turn.response_tokens for turn in episode) for episode in trace.episodes]


def steps_at_once(trace: Trace, max_num_seqs: int = 1024, max_num_batched_tokens: int = 8192) -> int:
    """Engine steps when all requests are there at the start: first come, first served, prompts read whole."""
    waiting = [turn for episode in trace.episodes for turn in episode][::-1]
    running: list[int] = []  # answer tokens left
    steps = 0
    while waiting or running:
        budget = max_num_batched_tokens - len(running)
        while waiting and len(running) < max_num_seqs and waiting[-1].prompt_tokens <= budget:
            turn = waiting.pop()
            budget -= turn.prompt_tokens
            running.append(turn.response_tokens)
        assert running, "a prompt is longer than a step may be"
        running = [left - 1 for left in running if left > 1]
        steps += 1
    return steps


def account(row: Mapping[str, Any], cost: StepCost, trace: Trace) -> Account:
    """The ledger of a row of the report; plain vLLM counts no steps, so that of the bound are computed."""
    if "steps" in row:
        steps, served = row["steps"], row["steps"] * row["mean_running"]
    else:
        steps, served = steps_at_once(trace), trace.response_tokens
    idle = row.get("idle_share", 0.0) * row["seconds"]
    return Account(row["arm"], row["seconds"], steps, cost.fixed * steps, cost.per_request * served, idle)


def floor_seconds(trace: Trace, cost: StepCost, prompts: float) -> float:
    """What no loop over these episodes can go below at this cost of a step."""
    return cost.fixed * max(chains(trace)) + cost.per_request * trace.response_tokens + prompts


def traced(report: Mapping[str, Any], given: Path | None) -> Trace:
    """The episodes of a report: those of a file, or drawn again as the benchmark drew them.

    Raises:
        ValueError: no file is given, and the benchmark drew none.
    """
    if given is not None:
        return Trace.load(given)
    if not report.get("drawn"):
        raise ValueError("the report is of a saved trace; name it with --trace")
    return Trace.draw(**report["drawn"])


def describe(report: Mapping[str, Any], trace: Trace) -> str:
    """The ledger as a Markdown table, and what follows.

    Raises:
        ValueError: the report is of other episodes, or of several engines.
    """
    if (len(trace.turns), trace.response_tokens) != (report["requests"], report["response_tokens"]):
        raise ValueError("the report was made of another trace; name it with --trace")
    if report["replicas"] != 1:
        raise ValueError(f"the ledger is that of one engine, the report has {report['replicas']}; use --replicas 1")
    cost = step_cost(report["steps"])
    accounts = [account(row, cost, trace) for row in report["rows"]]
    bound = min((entry for entry in accounts if "bound" in entry.arm), key=lambda entry: entry.seconds)
    cheapest = min(accounts, key=lambda entry: entry.prompts)
    floor = floor_seconds(trace, cost, cheapest.prompts)
    lengths = np.array(chains(trace))
    running = (lengths[:, None] > np.arange(lengths.max())).sum(axis=0)  # (steps,) if no episode ever waits
    lines = [
        f"a decode step: {1000 * cost.fixed:.2f} ms and {1000 * cost.per_request:.4f} ms a request",
        "| arm | engine steps | seconds | steps | requests | prompts | idle |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {entry.arm} | {entry.engine_steps:,} | {entry.seconds:.1f} | {entry.steps:.1f} | {entry.requests:.1f} | "
        f"{entry.prompts:.1f} | {entry.idle:.1f} |"
        for entry in accounts
    ]
    lines.append(
        f"at least {lengths.max():,} steps, {floor:.1f} s with the prompts of {cheapest.arm}: "
        f"{bound.seconds / floor:.2f} of the bound, {floor - bound.seconds:.1f} s more"
    )
    for few in TAILS:
        tail = running[running < few]
        seconds = cost.fixed * len(tail) + cost.per_request * tail.sum()
        lines.append(
            f"fewer than {few} episodes left: {len(tail):,} of these steps, {seconds:.1f} s of decoding, "
            f"{tail.sum() / trace.response_tokens:.1%} of the tokens"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--trace", type=Path, help="what --save-trace of the benchmark wrote")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    report = json.loads(args.report.read_text(encoding="utf-8"))
    try:
        logger.info(describe(report, traced(report, args.trace)))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
