"""The example of docs/environments.md runs as it stands: both forms of the environment, without Ray."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from agent_system.environments.registry import find_environment
from agent_system.environments.session_host import SessionHost
from verl.trainer.config import PPOTrainerConfig, default_config

PAGE = Path(__file__).resolve().parents[2] / "docs" / "environments.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


class PoolInThisProcess:
    """A session pool whose one host is called at once; a reference is the reply itself, boxed."""

    def __init__(self, builder: Any, marker: Path) -> None:
        self._host = SessionHost(builder, 10.0, 10.0, marker)

    def submit_resets(self, tasks: Sequence[tuple[int, Any]], namespace: str = "", fresh: bool = False) -> list[Any]:
        return [self._box(tasks, self._host.reset([(str(slot), task) for slot, task in tasks], fresh))]

    def submit_steps(self, actions: Sequence[tuple[int, Any]], namespace: str = "") -> list[Any]:
        return [self._box(actions, self._host.step([(str(slot), action) for slot, action in actions]))]

    def collect(self, ref: Any) -> list[tuple[int, Any]]:
        return ref

    @staticmethod
    def _box(items: Sequence[tuple[int, Any]], replies: Sequence[Any]) -> list[tuple[int, Any]]:
        return [(slot, reply) for (slot, _), reply in zip(items, replies)]


@pytest.fixture(scope="module")
def guess_env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    folder = tmp_path_factory.mktemp("page")
    (folder / "guess_env.py").write_text(BLOCKS[0], encoding="utf-8")
    sys.path.insert(0, str(folder))
    import guess_env as module

    yield module
    sys.path.remove(str(folder))
    del sys.modules["guess_env"]


@pytest.fixture(scope="module")
def config() -> PPOTrainerConfig:
    return default_config("preset=embedded", "env.env_name=guess", "env.rollout.n=2", "data.train_batch_size=3")


def bisect_action(text: str) -> str:
    low, high = map(int, re.findall(r"between (\d+) and (\d+)", text)[-1])
    return f"<action>{(low + high) // 2}</action>"


def test_the_second_block_runs(guess_env: ModuleType) -> None:
    scope: dict[str, Any] = {}
    exec(BLOCKS[1], scope)
    assert scope["rewards"].shape == (4,) and all(info["is_action_valid"] for info in scope["infos"])


def test_lock_step_form_is_solved_by_halving(guess_env: ModuleType, config: PPOTrainerConfig) -> None:
    train, val = find_environment("guess_lock_step")(config)
    observations, infos = train.reset()
    assert len(infos) == 6 and observations["text"][0] == observations["text"][1]
    won, steps = np.zeros(6, dtype=bool), [[] for _ in range(6)]
    for _ in range(6):
        actions = ["" if won[i] else bisect_action(text) for i, text in enumerate(observations["text"])]
        observations, rewards, dones, infos = train.step(actions)
        for i in np.flatnonzero(~won):
            steps[i].append(infos[i])
            assert rewards[i] == (10.0 if dones[i] else 0.0)
        won |= dones
    assert won.all()
    figures = train.success_evaluator(
        total_infos=steps, total_batch_list=[[{"active_masks": True}] * len(one) for one in steps]
    )
    assert figures["success_rate"].tolist() == [1.0] * 6
    secrets = [game.secret for game in train.envs.games]
    assert secrets[::2] == secrets[1::2]
    val.reset()
    first = [game.secret for game in val.envs.games]
    val.reset()
    assert [game.secret for game in val.envs.games] == first


@pytest.fixture
def make_manager(guess_env: ModuleType, config: PPOTrainerConfig, tmp_path: Path) -> Callable[..., Any]:
    def make(is_train: bool = True) -> Any:
        pool = PoolInThisProcess(guess_env.make_sessions, tmp_path / "marker")
        return guess_env.EventGuess(pool, config, 3, 2, is_train)

    return make


def test_event_driven_form_is_solved_by_halving(make_manager: Callable[..., Any]) -> None:
    manager = make_manager()
    (ref,) = manager.begin(range(3))
    shown = dict(manager.collect(ref))
    assert sorted(shown) == list(range(6)) and manager.task_id(0) == manager.task_id(1)
    won: set[int] = set()
    while shown:
        (ref,) = manager.submit_steps([(slot, bisect_action(seen.prompt)) for slot, seen in shown.items()])
        answers = dict(manager.collect(ref))
        assert all(seen.info["is_action_valid"] and not seen.infra_failed for seen in answers.values())
        won |= {slot for slot, seen in answers.items() if seen.reward == 10.0}
        shown = {slot: seen for slot, seen in answers.items() if not seen.done}
    assert won == set(range(6))


def test_event_driven_form_restarts_shortens_and_resumes(make_manager: Callable[..., Any]) -> None:
    manager = make_manager()
    tasks = [manager._start(range(3), None, 0, 0) for _ in range(3)]
    other = make_manager()
    other.load_state_dict({"rollouts": 2})
    assert other._start(range(3), None, 0, 0) == tasks[2]
    first, second = (make_manager(is_train=False)._start(range(3), None, 0, 1) for _ in range(2))
    assert first == second

    (ref,) = manager.begin([0])
    manager.collect(ref)
    for _ in range(2):
        (ref,) = manager.submit_steps([(0, "no number")])
        ((_, seen),) = manager.collect(ref)
        assert seen.info["is_action_valid"] is False
    assert len(manager.shorter_prompt(0, 1)) < len(seen.prompt)
    (ref,) = manager.restart(0)
    ((_, fresh),) = manager.collect(ref)
    assert fresh.prompt == manager.shorter_prompt(0, 0)


def test_a_broken_session_is_a_failed_observation(make_manager: Callable[..., Any]) -> None:
    manager = make_manager()
    manager.begin([0])
    manager.collect(manager.envs.submit_resets([(0, None)])[0])
    (ref,) = manager.envs.submit_steps([(0, "5")])  # compares a number with None
    ((_, seen),) = manager.collect(ref)
    assert seen.infra_failed and "TypeError" in seen.info["error"]
