"""Demonstrations of the scripted shopper, as rows for supervised fine-tuning.

One row is one step: the prompt exactly as training shows it (:class:`WebshopDialogue` writes both) and the response.
Episodes are played in generated catalogues of other seeds than the embedded one, and never on validation goals.

    python -m agent_system.environments.env_package.webshop.demonstrations rows.parquet --episodes 20000 \
        --skill skip_options=0.5 --skill wrong_product=0.2

The file does not depend on the number of worker processes: every job of :data:`EPISODES_PER_JOB` episodes has its own
seed, and jobs are written in order.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from agent_system.environments.env_package.webshop.expert import ExpertSkill, ScriptedExpert
from agent_system.environments.env_package.webshop.projection import project_action
from agent_system.environments.prompts.webshop import WebshopDialogue

__all__ = ["DemonstrationPlan", "Step", "play_episode", "summarise", "write_demonstrations"]

logger = logging.getLogger(__name__)

EPISODES_PER_JOB = 250
FIRST_CATALOGUE_SEED = 1000  # far from the embedded catalogue's
VALIDATION_GOALS = 500

_SCHEMA = pa.schema(
    [
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("episode", pa.int32()),
        ("step", pa.int16()),
        ("score", pa.float32()),
        ("won", pa.bool_()),
        ("catalogue_seed", pa.int32()),
        ("goal", pa.int32()),
    ]
)


class Session(Protocol):
    """What an episode needs of a shop session."""

    def reset(self, session: int) -> Any: ...

    def step(self, action: str) -> tuple[str, float, bool, Any]: ...

    def available_actions(self) -> Mapping[str, Any]: ...


class Shopper(Protocol):
    """Anything that answers a page with a whole response."""

    def act(self, page: str, available: Mapping[str, Any]) -> str: ...


@dataclass(frozen=True)
class Step:
    """One row: prompt and response, and what the episode it belongs to came to (``score`` of 0 to 1)."""

    prompt: str
    response: str
    episode: int
    step: int
    score: float
    won: bool
    catalogue_seed: int
    goal: int


@dataclass(frozen=True)
class DemonstrationPlan:
    """What to play.

    ``skills`` are drawn from evenly, one per episode. ``catalogues`` is the number of generated shops, with the seeds
    ``first_catalogue_seed`` and up; episodes go round them in turn.
    """

    episodes: int
    skills: tuple[ExpertSkill, ...] = (ExpertSkill(),)
    seed: int = 0
    catalogues: int = 8
    first_catalogue_seed: int = FIRST_CATALOGUE_SEED
    num_products: int = 1000
    human_goals: bool = False
    history_length: int = 2
    max_steps: int = 15

    def __post_init__(self) -> None:
        for name in ("episodes", "catalogues", "max_steps", "num_products"):
            if getattr(self, name) < 1:
                raise ValueError(f"demonstrations: {name} must be at least 1, got {getattr(self, name)}")
        if not self.skills:
            raise ValueError("demonstrations: skills must name at least one skill")


def play_episode(
    session: Session, goal: int, shopper: Shopper, history_length: int = 2, max_steps: int = 15
) -> list[tuple[str, str, float]]:
    """Play one goal to its end or to the step limit.

    Returns:
        (prompt, response, score) of every step; the score is 0 but for the step that buys.
    """
    first = session.reset(goal)
    page = first[0] if isinstance(first, tuple) else first
    available = session.available_actions()
    dialogue = WebshopDialogue(history_length)
    prompt = dialogue.start(page, available)
    steps: list[tuple[str, str, float]] = []
    while len(steps) < max_steps:
        response = shopper.act(page, available)
        action, _ = project_action(response)
        page, score, done, _ = session.step(action)
        steps.append((prompt, response, float(score)))
        if done:
            break
        available = session.available_actions()
        prompt = dialogue.advance(action, page, available)
    return steps


@lru_cache(maxsize=2)
def _open_shop(seed: int, num_products: int, human_goals: bool) -> Any:
    from agent_system.environments.env_package.webshop.session import load_shop

    return load_shop({"seed": seed, "num_products": num_products, "human_goals": human_goals, "data_dir": None})


def _play_job(plan: DemonstrationPlan, job: int) -> list[Step]:
    """Play one job: a run of episodes in one catalogue."""
    from agent_system.environments.env_package.webshop.session import ShopSession

    catalogue_seed = plan.first_catalogue_seed + job % plan.catalogues
    shop = _open_shop(catalogue_seed, plan.num_products, plan.human_goals)
    goals = range(VALIDATION_GOALS, len(shop.goals))
    if not goals:
        raise ValueError(
            f"demonstrations: num_products={plan.num_products} gives {len(shop.goals)} goals, none beyond the "
            f"{VALIDATION_GOALS} that are kept for validation; take more products"
        )
    rng = random.Random(f"demonstrations/{plan.seed}/{job}")
    first = job * EPISODES_PER_JOB
    session = ShopSession(shop)
    rows: list[Step] = []
    for episode in range(first, min(first + EPISODES_PER_JOB, plan.episodes)):
        goal = rng.choice(goals)
        expert = ScriptedExpert(rng.getrandbits(48), plan.skills[episode % len(plan.skills)])
        steps = play_episode(session, goal, expert, plan.history_length, plan.max_steps)
        score = steps[-1][2]
        rows += [
            Step(prompt, response, episode, number, score, score == 1.0, catalogue_seed, goal)
            for number, (prompt, response, _) in enumerate(steps)
        ]
    return rows


def _play_all(plan: DemonstrationPlan, workers: int) -> Iterator[list[Step]]:
    """The jobs' rows in order, whatever the number of processes."""
    jobs = range((plan.episodes + EPISODES_PER_JOB - 1) // EPISODES_PER_JOB)
    if workers <= 1:
        yield from (_play_job(plan, job) for job in jobs)
        return
    with ProcessPoolExecutor(max_workers=workers) as pool:
        yield from pool.map(_play_job, [plan] * len(jobs), jobs)


def write_demonstrations(
    path: str | os.PathLike[str],
    plan: DemonstrationPlan,
    workers: int = 1,
    keep: Callable[[Step], bool] | None = None,
) -> dict[str, float]:
    """Play the plan and write its rows to a parquet file (written beside its name and renamed when complete).

    Args:
        path: the file to write; columns ``prompt``, ``response`` and where the row comes from.
        plan: what to play.
        workers: processes to play in.
        keep: rows for which it is false are left out of the file (not of the figures).

    Returns:
        The figures of :func:`summarise` over all rows played.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    ends: list[Step] = []
    rows = 0
    try:
        with (
            pq.ParquetWriter(part, _SCHEMA, compression="zstd") as writer,
            tqdm(total=plan.episodes, desc="demonstrations", unit="episode", disable=None) as bar,
        ):
            for played in _play_all(plan, workers):
                rows += len(played)
                last = {step.episode: step for step in played}
                ends += [replace(step, prompt="", response="") for step in last.values()]
                writer.write_table(_table(played if keep is None else filter(keep, played)))
                bar.update(len(last))
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    os.replace(part, target)
    figures = summarise(ends, rows)
    logger.info("wrote %s: %s", target, ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))
    return figures


def _table(rows: Iterable[Step]) -> pa.Table:
    rows = list(rows)
    return pa.table({name: [getattr(row, name) for row in rows] for name in _SCHEMA.names}, schema=_SCHEMA)


def summarise(last_steps: Sequence[Step], rows: int) -> dict[str, float]:
    """Episodes, rows, and over episodes: share won, mean score, mean steps."""
    count = max(len(last_steps), 1)
    return {
        "episodes": float(len(last_steps)),
        "rows": float(rows),
        "won": sum(step.won for step in last_steps) / count,
        "score": sum(step.score for step in last_steps) / count,
        "steps": rows / count,
    }


def _read_skill(pairs: Sequence[str]) -> ExpertSkill:
    names = [item.name for item in fields(ExpertSkill)]
    values: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name not in names:
            raise ValueError(f"--skill takes name=probability with a name of {', '.join(names)}; got {pair!r}")
        values[name] = float(value)
    return ExpertSkill(**values)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; see the module's text."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description="Write demonstrations of the scripted WebShop shopper.")
    parser.add_argument("path", help="parquet file to write")
    parser.add_argument("--episodes", type=int, default=20_000)
    parser.add_argument("--skill", action="append", default=[], metavar="NAME=P", help="probability of one slip")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--catalogues", type=int, default=8, help="number of generated shops")
    parser.add_argument("--num-products", type=int, default=1000)
    parser.add_argument("--human-goals", action="store_true")
    parser.add_argument("--history-length", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=15)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parsed = parser.parse_args(arguments)
    plan = DemonstrationPlan(
        episodes=parsed.episodes,
        skills=(_read_skill(parsed.skill),),
        seed=parsed.seed,
        catalogues=parsed.catalogues,
        num_products=parsed.num_products,
        human_goals=parsed.human_goals,
        history_length=parsed.history_length,
        max_steps=parsed.max_steps,
    )
    write_demonstrations(parsed.path, plan, parsed.workers)


if __name__ == "__main__":
    main()
