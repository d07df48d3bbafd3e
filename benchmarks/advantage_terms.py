"""How much GiGPO's step term adds to its episode term on WebShop, with a scripted shopper in the model's place.

    python3 -m benchmarks.advantage_terms
    python3 -m benchmarks.advantage_terms --skill skip_options=0.1 --skill wrong_product=0.1 --batches 40

Batches of 16 tasks × 8 episodes in the embedded shop, on training goals, reward 10 for a solved task. The shopper's
slips are those of the demonstrations that SmolLM2's short start learns from (``examples/smollm2/make_start.sh``), so
that it stands for that model before training. Nothing is trained; a few seconds on one core.

Beside the metrics of a run (``gigpo/terms_correlation`` and others): how often the signs of the two terms agree where
neither is 0, and the correlation of their sum, which is GiGPO's advantage, with the episode term, which is GRPO's.
"""

from __future__ import annotations

import argparse
import logging
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from agent_system.environments.env_package.webshop.demonstrations import VALIDATION_GOALS
from agent_system.environments.env_package.webshop.expert import ExpertSkill, ScriptedExpert
from agent_system.environments.env_package.webshop.projection import project_action
from agent_system.environments.env_package.webshop.session import ShopSession, load_shop
from gigpo.core_gigpo import gigpo_metrics, gigpo_terms

logger = logging.getLogger("benchmarks.advantage_terms")

START = {"skip_options": 0.5, "wrong_product": 0.3, "ignore_price": 0.3, "lazy_query": 0.2}
TASKS, EPISODES, MAX_STEPS, REWARD = 16, 8, 15, 10.0


class Step(NamedTuple):
    """One step of a batch: its task, episode, page, the episode's reward, and the discounted return."""

    task: int
    episode: int
    page: str
    reward: float
    step_return: float


def play(session: ShopSession, goal: int, shopper: ScriptedExpert) -> tuple[list[str], bool]:
    """The pages of an episode, and whether it solved its task."""
    page = session.reset(goal)
    pages: list[str] = []
    score, done = 0.0, False
    while not done and len(pages) < MAX_STEPS:
        pages.append(page)
        action, _ = project_action(shopper.act(page, session.available_actions()))
        page, score, done, _ = session.step(action)
    return pages, score == 1.0


def play_batch(session: ShopSession, goals: int, skill: ExpertSkill, rng: random.Random, gamma: float) -> list[Step]:
    """``TASKS`` groups of ``EPISODES`` episodes on random training goals."""
    steps = []
    for task in range(TASKS):
        goal = rng.randrange(VALIDATION_GOALS, goals)
        for episode in range(task * EPISODES, (task + 1) * EPISODES):
            pages, won = play(session, goal, ScriptedExpert(rng.getrandbits(48), skill))
            reward = REWARD * won
            last = len(pages) - 1
            steps += [Step(task, episode, page, reward, gamma ** (last - t) * reward) for t, page in enumerate(pages)]
    return steps


def compare(steps: Sequence[Step]) -> dict[str, float]:
    """The figures of one batch."""
    columns = [np.array(column, dtype=object) for column in zip(*steps, strict=True)]
    task, episode, pages, reward, returns = columns
    rewards = torch.tensor(reward.astype(np.float32))[:, None]  # (steps, 1 token)
    terms = gigpo_terms(
        rewards, torch.tensor(returns.astype(np.float32)), torch.ones_like(rewards), pages, task, episode
    )  # fmt: skip
    won_by_task = [{step.episode: step.reward > 0 for step in steps if step.task == number} for number in set(task)]
    neither = (terms.episode != 0) & (terms.step != 0)
    return {
        "success": float(np.mean([list(won.values()) for won in won_by_task])),
        "steps per episode": len(steps) / (TASKS * EPISODES),
        "groups without signal": float(np.mean([len(set(won.values())) == 1 for won in won_by_task])),
        **gigpo_metrics(terms),
        "signs agree": float((np.sign(terms.episode) == np.sign(terms.step))[neither].mean()),
        "correlation of sum and episode term": correlation(terms.episode, terms.episode + terms.step),
    }


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Pearson's, over steps."""
    return float(np.corrcoef(first, second)[0, 1])


def measure(skill: ExpertSkill, batches: int, gamma: float, seed: int) -> dict[str, tuple[float, float]]:
    """Mean and standard error over batches of every figure."""
    shop: Any = load_shop({"seed": 0, "data_dir": None})
    session, rng = ShopSession(shop), random.Random(seed)
    figures = [compare(play_batch(session, len(shop.goals), skill, rng, gamma)) for _ in range(batches)]
    values = {name: np.array([figure[name] for figure in figures]) for name in figures[0]}
    return {name: (float(of.mean()), float(of.std(ddof=1) / len(of) ** 0.5)) for name, of in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skill", action="append", metavar="NAME=P", help="probability of one slip")
    parser.add_argument("--batches", type=int, default=20, help="at least 2")
    parser.add_argument("--gamma", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    given = dict(pair.split("=") for pair in args.skill or ())
    skill = ExpertSkill(**({name: float(value) for name, value in given.items()} or START))
    rows = measure(skill, args.batches, args.gamma, args.seed)
    lines = ["| figure | mean ± standard error |", "| --- | --- |"]
    lines += [f"| {name} | {mean:.3f} ± {error:.3f} |" for name, (mean, error) in rows.items()]
    logger.info("\n".join(lines))


if __name__ == "__main__":
    main()
