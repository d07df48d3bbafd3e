"""How long the advantage arithmetic takes on the driver.

::

    python -m benchmarks.estimators                       # 2,000 and 50,000 rows, responses of at most 512 tokens
    python -m benchmarks.estimators --rows 10000 --response-length 128

Each case is what the trainer calls, ``compute_advantage`` with an ``algorithm`` section: checks, statistics and the
tensors of advantages and returns. Rows look like those of WebShop: groups of 8 trajectories of 10 steps, page texts of
some 1,500 characters of which a few dozen differ within a task. ``images`` has 300 x 300 x 3 anchors instead,
``similarity`` groups texts that are alike; both are timed at 2,000 rows only. The time is the median over several calls
of the CPU time of one thread, which on an idle machine is the time that passes. The goals are 50 ms at 2,000 rows and
1.5 s at 50,000 for each estimator on texts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from gigpo.core_gigpo import compute_step_discounted_returns
from verl.protocol import DataProto
from verl.trainer.config import default_config
from verl.trainer.config.schema import AlgorithmConfig
from verl.trainer.ppo.advantage import compute_advantage

logger = logging.getLogger(__name__)

STEPS_PER_TRAJECTORY = 10
ROWS_PER_TASK = 80
PAGES_PER_TASK = 30
GOALS_MS = {2_000: 50.0, 50_000: 1_500.0}
FEW_ROWS = 2_000

ESTIMATORS: dict[str, tuple[str, ...]] = {
    "gae": ("adv_estimator=gae", "lam=0.95"),
    "grpo": ("adv_estimator=grpo",),
    "grpo, per trajectory": ("adv_estimator=grpo", "compute_mean_std_cross_steps=false"),
    "dr.grpo": ("adv_estimator=grpo", "norm_adv_by_std_in_grpo=false"),
    "grpo_passk": ("adv_estimator=grpo_passk", "compute_mean_std_cross_steps=false"),
    "rloo": ("adv_estimator=rloo",),
    "reinforce_plus_plus": ("adv_estimator=reinforce_plus_plus", "gamma=0.99"),
    "reinforce_plus_plus_baseline": ("adv_estimator=reinforce_plus_plus_baseline",),
    "remax": ("adv_estimator=remax",),
    "gigpo": ("adv_estimator=gigpo", "gigpo.mode=mean_std_norm"),
    "gigpo, per trajectory": ("adv_estimator=gigpo", "compute_mean_std_cross_steps=false"),
    "hgpo": ("adv_estimator=hgpo", "hgpo.history_length=2"),
}
COSTLY = {
    "gigpo, images": ("adv_estimator=gigpo",),
    "gigpo, similarity": ("adv_estimator=gigpo", "gigpo.enable_similarity=true", "gigpo.similarity_thresh=0.9"),
}


def algorithm(overrides: tuple[str, ...]) -> AlgorithmConfig:
    """The ``algorithm`` section with some values changed."""
    return default_config(*(f"algorithm.{one}" for one in overrides)).algorithm


def make_rows(rows: int, response_length: int, seed: int = 0) -> DataProto:
    """`rows` rows of a training step whose episodes succeed half the time, with the columns of every estimator."""
    rng = np.random.default_rng(seed)
    numbers = np.arange(rows)
    lengths = torch.from_numpy(rng.integers(1, response_length + 1, rows))
    mask = (torch.arange(response_length) < lengths.unsqueeze(-1)).long()
    rewards = torch.zeros(rows, response_length)
    rewards[torch.arange(rows), lengths - 1] = torch.from_numpy(rng.integers(0, 2, rows) * 10.0).float()
    pages = rng.integers(PAGES_PER_TASK, size=rows)
    last_step = numbers % STEPS_PER_TRAJECTORY == STEPS_PER_TRAJECTORY - 1
    return DataProto.from_dict(
        tensors={
            "token_level_rewards": rewards,
            "response_mask": mask,
            "step_rewards": torch.from_numpy(rng.random(rows)).float(),
            "values": torch.from_numpy(rng.standard_normal((rows, response_length), dtype=np.float32)),
            "reward_baselines": torch.from_numpy(rng.integers(0, 2, rows) * 10.0).float(),
        },
        non_tensors={
            "uid": np.array([f"task-{n // ROWS_PER_TASK}" for n in numbers], dtype=object),
            "traj_uid": np.array([f"trajectory-{n // STEPS_PER_TRAJECTORY}" for n in numbers], dtype=object),
            "step_index": numbers % STEPS_PER_TRAJECTORY,
            "anchor_obs": np.array(["[SEP] a product page " * 70 + str(page) for page in pages], dtype=object),
            "rewards": np.where(last_step, 10.0, 0.0),
        },
    )


def with_images(rows: DataProto, seed: int = 0) -> DataProto:
    """The same rows with pictures as anchors, an array of its own each."""
    rng = np.random.default_rng(seed)
    pictures = [rng.integers(0, 256, (300, 300, 3), dtype=np.uint8) for _ in range(PAGES_PER_TASK)]
    anchors = np.empty(len(rows), dtype=object)
    anchors[:] = [pictures[page].copy() for page in rng.integers(PAGES_PER_TASK, size=len(rows))]
    columns = {**rows.non_tensor_batch, "anchor_obs": anchors}
    return dataclasses.replace(rows, non_tensor_batch=columns)


def cases(rows: DataProto) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is timed, by name."""
    yield "step returns", lambda: compute_step_discounted_returns(rows, 0.95)
    for name, overrides in ESTIMATORS.items():
        yield name, partial(compute_advantage, rows, algorithm(overrides))
    if len(rows) <= FEW_ROWS:
        pictures = with_images(rows)
        for name, overrides in COSTLY.items():
            yield name, partial(compute_advantage, pictures if "images" in name else rows, algorithm(overrides))


def median_ms(call: Callable[[], Any], repeats: int) -> float:
    """Median CPU time of `call` in milliseconds, after one call that does not count."""
    call()
    seconds = []
    for _ in range(repeats):
        started = time.process_time()
        call()
        seconds.append(time.process_time() - started)
    return statistics.median(seconds) * 1000.0


def main() -> None:
    """Time every case and log one line of JSON per row count."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=list(GOALS_MS))
    parser.add_argument("--response-length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for count in args.rows:
        rows = make_rows(count, args.response_length)
        milliseconds = {name: round(median_ms(call, args.repeats), 2) for name, call in cases(rows)}
        report: dict[str, Any] = {"rows": count, "response_length": args.response_length, "ms": milliseconds}
        if count in GOALS_MS:
            slowest = max(milliseconds["step returns"] + milliseconds[name] for name in ESTIMATORS)
            report |= {"goal_ms": GOALS_MS[count], "slowest_ms": slowest, "reached": slowest <= GOALS_MS[count]}
        logger.info(json.dumps(report))


if __name__ == "__main__":
    main()
