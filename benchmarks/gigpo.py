"""How long the advantage arithmetic takes on the driver.

::

    python -m benchmarks.gigpo                       # 2,000 and 50,000 rows, responses of at most 512 tokens
    python -m benchmarks.gigpo --rows 10000 --response-length 128

Rows look like those of WebShop: groups of 8 trajectories of 10 steps, page texts of some 1,500 characters of which a
few dozen differ within a task. `images` has 300 x 300 x 3 anchors instead, `similarity` groups texts that are alike.
The time is the median of several calls; the goals are 50 ms at 2,000 rows and 1.5 s at 50,000 for step returns and
GiGPO together.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from gigpo.core_gigpo import compute_gigpo_outcome_advantage, compute_step_discounted_returns
from gigpo.hgpo import compute_hgpo_outcome_advantage
from verl.trainer.ppo.core_algos import (
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_rloo_outcome_advantage,
)

logger = logging.getLogger(__name__)

STEPS_PER_TRAJECTORY = 10
ROWS_PER_TASK = 80
PAGES_PER_TASK = 30
GOALS_MS = {2_000: 50.0, 50_000: 1_500.0}


@dataclass
class Batch:
    """Random rows of one training step."""

    rewards: torch.Tensor  # (N, R)
    mask: torch.Tensor  # (N, R) int64
    step_rewards: torch.Tensor  # (N,)
    env_rewards: np.ndarray  # (N,)
    texts: np.ndarray  # (N,) object
    images: np.ndarray  # (N,) object
    uid: np.ndarray  # (N,) object
    traj_uid: np.ndarray  # (N,) object
    step_index: np.ndarray  # (N,)


def make_batch(rows: int, response_length: int, seed: int = 0) -> Batch:
    """`rows` rows whose episodes succeed half the time."""
    rng = np.random.default_rng(seed)
    numbers = np.arange(rows)
    lengths = torch.from_numpy(rng.integers(1, response_length + 1, rows))
    mask = (torch.arange(response_length) < lengths.unsqueeze(-1)).long()
    rewards = torch.zeros(rows, response_length)
    rewards[torch.arange(rows), lengths - 1] = torch.from_numpy(rng.integers(0, 2, rows) * 10.0).float()
    pages = rng.integers(PAGES_PER_TASK, size=rows)
    pictures = [rng.integers(0, 256, (300, 300, 3), dtype=np.uint8) for _ in range(PAGES_PER_TASK)]
    images = np.empty(rows, dtype=object)
    images[:] = [pictures[page] for page in pages]
    env_rewards = np.where(numbers % STEPS_PER_TRAJECTORY == STEPS_PER_TRAJECTORY - 1, 10.0, 0.0)
    return Batch(
        rewards=rewards,
        mask=mask,
        step_rewards=torch.from_numpy(rng.random(rows)).float(),
        env_rewards=env_rewards,
        texts=np.array(["[SEP] a product page " * 70 + str(page) for page in pages], dtype=object),
        images=images,
        uid=np.array([f"task-{n // ROWS_PER_TASK}" for n in numbers], dtype=object),
        traj_uid=np.array([f"trajectory-{n // STEPS_PER_TRAJECTORY}" for n in numbers], dtype=object),
        step_index=numbers % STEPS_PER_TRAJECTORY,
    )


def cases(batch: Batch) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    arrays = {"rewards": batch.env_rewards, "traj_uid": batch.traj_uid, "step_index": batch.step_index}
    data = SimpleNamespace(non_tensor_batch=arrays)
    common = (batch.rewards, batch.mask, batch.uid, batch.traj_uid)

    def gigpo(anchors: np.ndarray, **options: Any) -> Callable[[], Any]:
        return lambda: compute_gigpo_outcome_advantage(
            batch.rewards, batch.step_rewards, batch.mask, anchors, batch.uid, batch.traj_uid, **options
        )

    return {
        "step returns": lambda: compute_step_discounted_returns(data, 0.95),
        "gigpo": gigpo(batch.texts, mode="mean_std_norm"),
        "gigpo, per trajectory": gigpo(batch.texts, compute_mean_std_cross_steps=False, step_index=batch.step_index),
        "gigpo, images": gigpo(batch.images),
        "gigpo, similarity": gigpo(batch.texts, enable_similarity=True, similarity_thresh=0.9),
        "hgpo, history 2": lambda: compute_hgpo_outcome_advantage(
            batch.rewards, batch.step_rewards, batch.mask, batch.texts, batch.uid, batch.traj_uid, history_length=2
        ),
        "grpo": lambda: compute_grpo_outcome_advantage(*common),
        "rloo": lambda: compute_rloo_outcome_advantage(*common),
        "reinforce++": lambda: compute_reinforce_plus_plus_outcome_advantage(batch.rewards, batch.mask, 1.0),
        "gae": lambda: compute_gae_advantage_return(batch.rewards, batch.rewards, batch.mask, 1.0, 0.95),
    }


def median_ms(call: Callable[[], Any], repeats: int) -> float:
    """Median duration of `call` in milliseconds, after one call that does not count."""
    call()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) * 1000.0


def main() -> None:
    """Time every case and log one line of JSON per row count."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=list(GOALS_MS))
    parser.add_argument("--response-length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    for rows in args.rows:
        batch = make_batch(rows, args.response_length)
        milliseconds = {name: round(median_ms(call, args.repeats), 2) for name, call in cases(batch).items()}
        report: dict[str, Any] = {"rows": rows, "response_length": args.response_length, "ms": milliseconds}
        if rows in GOALS_MS:
            total = milliseconds["step returns"] + milliseconds["gigpo"]
            report["goal_ms"], report["reached"] = GOALS_MS[rows], total <= GOALS_MS[rows]
        logger.info(json.dumps(report))


if __name__ == "__main__":
    main()
