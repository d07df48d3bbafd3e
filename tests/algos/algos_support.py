"""Small batches for the tests of the algorithms, and the estimators written down plainly, as a second opinion."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st


@dataclass
class Rows:
    """N rows of at most R tokens, as the estimators take them."""

    rewards: torch.Tensor  # (N, R)
    mask: torch.Tensor  # (N, R)
    uid: np.ndarray  # (N,)
    traj_uid: np.ndarray  # (N,)
    step_index: np.ndarray  # (N,)
    anchors: np.ndarray  # (N,)
    step_rewards: torch.Tensor  # (N,)

    def __len__(self) -> int:
        return len(self.uid)

    def select(self, rows: Any) -> Rows:
        """The chosen rows, in that order."""
        rows = np.asarray(rows, dtype=np.int64)
        return Rows(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    @property
    def scores(self) -> list[float]:
        """(N,) sums of the rewards."""
        return self.rewards.double().sum(-1).tolist()


def objects(values: Any) -> np.ndarray:
    """A one-dimensional object array."""
    values = list(values)
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def rows_of(
    lengths: list[int],
    scores: list[float],
    uid: list[str],
    traj_uid: list[str],
    anchors: list[Any],
    step_rewards: list[float],
    width: int | None = None,
) -> Rows:
    """Rows whose score lies on the last valid token; steps of a trajectory come in order of time."""
    width = width or max(max(lengths), 1)
    mask = (torch.arange(width) < torch.tensor(lengths).unsqueeze(-1)).long()
    rewards = torch.zeros(len(lengths), width)
    seen: dict[str, int] = defaultdict(int)
    steps = []
    for row, (length, score, traj) in enumerate(zip(lengths, scores, traj_uid, strict=True)):
        if length:
            rewards[row, length - 1] = score
        steps.append(seen[traj])
        seen[traj] += 1
    return Rows(
        rewards,
        mask,
        objects(uid),
        objects(traj_uid),
        np.array(steps, dtype=np.int64),
        objects(anchors),
        torch.tensor(step_rewards, dtype=torch.float32),
    )


def fixture_f() -> Rows:
    """Five rows, two tasks, three trajectories; the figures expected of it come from the reference's formulas."""
    return rows_of(
        lengths=[3, 2, 4, 1, 3],
        scores=[10.0, 9.9, 0.0, -0.1, 10.0],
        uid=list("ggggh"),
        traj_uid=["t1", "t1", "t2", "t2", "t3"],
        anchors=["s0", "s1", "s0", "s2", "s0"],
        step_rewards=[9.5, 10.0, 0.0, -0.1, 10.0],
    )


def first_token(tensor: torch.Tensor) -> list[float]:
    """Value at the first token of each row."""
    return tensor[:, 0].tolist()


@st.composite
def random_rows(draw: st.DrawFn, max_tasks: int = 3, max_trajectories: int = 4, max_steps: int = 4) -> Rows:
    """Rows of random tasks, trajectories, states, rewards and lengths."""
    # Halves and tenths: numbers that do and do not have an exact binary form.
    number = st.one_of(st.integers(-20, 20).map(lambda n: n / 2), st.integers(-20, 20).map(lambda n: n / 10))
    columns: dict[str, list[Any]] = {
        key: [] for key in ("lengths", "scores", "uid", "traj_uid", "anchors", "step_rewards")
    }
    for task in range(draw(st.integers(1, max_tasks))):
        for trajectory in range(draw(st.integers(1, max_trajectories))):
            for _ in range(draw(st.integers(1, max_steps))):
                columns["lengths"].append(draw(st.integers(1, 4)))
                columns["scores"].append(draw(number))
                columns["uid"].append(f"task{task}")
                columns["traj_uid"].append(f"task{task}-{trajectory}")
                columns["anchors"].append(draw(st.sampled_from("abc")))
                columns["step_rewards"].append(draw(number))
    return rows_of(**columns, width=5)


# ------------------------------------------------------------------------------------------- plain second opinions


def mean_and_std(values: list[float]) -> tuple[float, float]:
    """Mean and unbiased standard deviation of at least two numbers."""
    mean = sum(values) / len(values)
    return mean, (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5


def plain_episode_term(
    rows: Rows, scores: list[float], std: bool, cross_steps: bool, epsilon: float = 1e-6
) -> list[float]:
    """The definition of the group-relative value of a row, one loop per row."""
    result = []
    for i in range(len(rows)):
        pool = [j for j in range(len(rows)) if rows.uid[j] == rows.uid[i]]
        if not cross_steps:
            pool = [
                j
                for j in pool
                if rows.step_index[j] == min(rows.step_index[k] for k in pool if rows.traj_uid[k] == rows.traj_uid[j])
            ]
        if len(pool) == 1:
            value = scores[i] / (1 + epsilon) if std else scores[i]
        else:
            mean, deviation = mean_and_std([scores[j] for j in pool])
            value = (scores[i] - mean) / (deviation + epsilon) if std else scores[i] - mean
        result.append(value)
    return result


def plain_step_term(rows: Rows, groups: list[Any], std: bool, epsilon: float = 1e-6) -> list[float]:
    """The definition of the step term, one loop per row; `groups` has a key per row, None for a row in no group."""
    returns = rows.step_rewards.double().tolist()
    result = []
    for i in range(len(rows)):
        pool = [j for j in range(len(rows)) if groups[i] is not None and groups[j] == groups[i]]
        if len(pool) < 2:
            result.append(0.0)
            continue
        mean, deviation = mean_and_std([returns[j] for j in pool])
        result.append((returns[i] - mean) / (deviation + epsilon) if std else returns[i] - mean)
    return result


# ------------------------------------------------------------------------------------------- config


def actor_config(**changes: Any) -> SimpleNamespace:
    """An actor config with the shipped defaults, as far as losses read it."""
    options = {
        "loss_mode": "vanilla",
        "clip_cov_ratio": 2e-4,
        "clip_cov_lb": 1.0,
        "clip_cov_ub": 5.0,
        "kl_cov_ratio": 2e-4,
        "ppo_kl_coef": 1.0,
    }
    values: dict[str, Any] = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
    for key, value in changes.items():
        (options if key in options else values)[key] = value
    return SimpleNamespace(**values, policy_loss=SimpleNamespace(**options))


def algorithm_config(adv_estimator: str, **changes: Any) -> SimpleNamespace:
    """An `algorithm` config with the shipped defaults."""
    values: dict[str, Any] = {
        "adv_estimator": adv_estimator,
        "gamma": 1.0,
        "lam": 1.0,
        "norm_adv_by_std_in_grpo": True,
        "compute_mean_std_cross_steps": True,
        "use_pf_ppo": False,
        "pf_ppo": SimpleNamespace(reweight_method="pow", weight_pow=2.0),
        "gigpo": SimpleNamespace(
            step_advantage_w=1.0, mode="mean_norm", enable_similarity=False, similarity_thresh=0.95
        ),
        "hgpo": SimpleNamespace(
            alpha=1.0, mode="mean_norm", episode_advantage_w=0.0, history_length=2, as_published=False
        ),
    }
    return SimpleNamespace(**{**values, **changes})
