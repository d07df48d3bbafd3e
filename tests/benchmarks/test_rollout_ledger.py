"""The ledger of a rollout benchmark adds up, and its floor follows from the longest episode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rollout_ledger import account, describe, floor_seconds, step_cost, steps_at_once, traced
from benchmarks.rollout_trace import Trace, TraceTurn

TRACE = Trace([[TraceTurn(10, 3, 0.0), TraceTurn(10, 4, 0.0)], [TraceTurn(10, 5, 0.0)]], group_size=2)
STEPS = [{"batch": batch, "decode_ms": 2 + 0.5 * batch} for batch in (1, 4, 8)]


def _report(**changes: Any) -> dict[str, Any]:
    rows = [
        {"arm": "bound", "seconds": 1.0},
        {"arm": "loop", "seconds": 2.0, "steps": 8, "mean_running": 1.5, "idle_share": 0.25},
    ]
    return {"requests": 3, "response_tokens": 12, "replicas": 1, "steps": STEPS, "rows": rows} | changes


def test_a_line_through_exact_points_is_found() -> None:
    cost = step_cost(STEPS)
    assert (cost.fixed, cost.per_request) == pytest.approx((0.002, 0.0005))
    with pytest.raises(ValueError, match="--step-batches"):
        step_cost(STEPS[:1])
    with pytest.raises(ValueError, match="faster with more requests"):
        step_cost([{"batch": 1, "decode_ms": 3.0}, {"batch": 8, "decode_ms": 2.0}])


def test_the_parts_of_an_arm_add_up_to_its_seconds() -> None:
    entry = account(_report()["rows"][1], step_cost(STEPS), TRACE)
    assert (entry.steps, entry.requests, entry.idle) == pytest.approx((8 * 0.002, 12 * 0.0005, 0.5))
    assert entry.steps + entry.requests + entry.idle + entry.prompts == pytest.approx(2.0)


def test_steps_at_once_follow_the_longest_answer_and_the_limits() -> None:
    assert steps_at_once(TRACE) == 5
    assert steps_at_once(TRACE, max_num_seqs=1) == 12
    assert steps_at_once(TRACE, max_num_batched_tokens=12) == 1 + 1 + 5  # one prompt a step, the longest answer last


def test_the_floor_has_a_step_for_each_token_of_the_longest_episode() -> None:
    assert floor_seconds(TRACE, step_cost(STEPS), prompts=0.1) == pytest.approx(7 * 0.002 + 12 * 0.0005 + 0.1)
    text = describe(_report(), TRACE)
    assert "at least 7 steps" in text and "| loop | 8 | 2.0 |" in text


def test_no_arm_of_the_report_lies_below_the_floor() -> None:
    # At 16 ms for 8 steps, 6 ms for requests and nothing idle, 0.1 s leave 78 ms for prompts, where the bound has 984 ms.
    rows = [*_report()["rows"], {"arm": "quick", "seconds": 0.1, "steps": 8, "mean_running": 1.5, "idle_share": 0.0}]
    text = describe(_report(rows=rows), TRACE)
    assert "at least 7 steps, 0.1 s with the prompts of quick: 10.20 of the bound, -0.9 s more" in text


def test_reports_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="--trace"):
        describe(_report(requests=4), TRACE)
    with pytest.raises(ValueError, match="--replicas"):
        describe(_report(replicas=2), TRACE)


def test_episodes_that_the_benchmark_drew_are_drawn_again(tmp_path: Path) -> None:
    drawn = dict(episodes=4, group_size=2, turns=(1, 3), prompt_tokens=(5, 9), response_tokens=(2, 4), env_seconds=0.1)
    report = json.loads(json.dumps(_report(drawn=drawn)))
    assert traced(report, None).episodes == Trace.draw(**drawn).episodes
    TRACE.save(tmp_path / "trace.json")
    assert traced(report, tmp_path / "trace.json").episodes == TRACE.episodes
    for other in (_report(drawn=None), _report()):
        with pytest.raises(ValueError, match="--trace"):
            traced(other, None)
