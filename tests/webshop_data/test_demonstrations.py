"""Demonstrations: rows as training shows them, the same for any number of processes, never on validation goals."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from agent_system.environments.env_package.webshop import demonstrations
from agent_system.environments.env_package.webshop.demonstrations import DemonstrationPlan, play_episode
from agent_system.environments.env_package.webshop.expert import ExpertSkill, ScriptedExpert
from agent_system.environments.env_package.webshop.projection import is_admissible, project_action
from agent_system.environments.env_package.webshop.session import ShopServer, ShopSession, load_shop


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        demonstrations._open_shop.cache_clear()
        yield folder
    demonstrations._open_shop.cache_clear()


@pytest.fixture(scope="module")
def shop(cache: Path) -> ShopServer:
    return load_shop({"seed": 0})


def win_rate(shop: ShopServer, goals: range, skill: ExpertSkill) -> float:
    session = ShopSession(shop)
    won = 0
    for goal in goals:
        steps = play_episode(session, goal, ScriptedExpert(goal, skill))
        won += steps[-1][2] == 1.0
    return won / len(goals)


def test_the_shopper_wins_nearly_always_and_each_slip_costs(shop: ShopServer) -> None:
    goals = range(300)
    assert win_rate(shop, goals, ExpertSkill()) >= 0.95
    for slip, at_most in (("skip_options", 0.1), ("wrong_product", 0.5), ("lazy_query", 0.95), ("skip_checks", 0.85)):
        assert win_rate(shop, goals, ExpertSkill(**{slip: 1.0})) <= at_most
    human = load_shop({"seed": 0, "human_goals": True})
    assert win_rate(human, goals, ExpertSkill()) >= 0.95


def test_every_action_is_valid_and_possible(shop: ShopServer) -> None:
    skill = ExpertSkill(*[0.3] * 6)
    session = ShopSession(shop)
    for goal in range(100):
        expert = ScriptedExpert(goal, skill)
        page, available = session.reset(goal), session.available_actions()
        for _ in range(15):
            action, valid = project_action(expert.act(page, available))
            assert valid and is_admissible(action, available)
            page, _, done, _ = session.step(action)
            available = session.available_actions()
            if done:
                break


def test_rows_are_the_prompts_of_training(shop: ShopServer) -> None:
    steps = play_episode(ShopSession(shop), 600, ScriptedExpert(0), history_length=2)
    task = shop.goals[600].instruction_text
    assert all(task in prompt for prompt, _, _ in steps)
    assert "'search[<your query>]'," in steps[0][0] and "Action 1: 'search[" in steps[1][0]
    assert "Action 1: " not in steps[3][0] and "Action 3: " in steps[3][0]
    assert [score for _, _, score in steps[:-1]] == [0.0] * (len(steps) - 1)


def test_the_file_does_not_depend_on_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shop: ShopServer
) -> None:
    plan = DemonstrationPlan(episodes=500, skills=(ExpertSkill(skip_options=0.5),), catalogues=2, num_products=400)
    figures = demonstrations.write_demonstrations(tmp_path / "one.parquet", plan, workers=1)
    demonstrations.write_demonstrations(tmp_path / "two.parquet", plan, workers=2)
    table = pq.read_table(tmp_path / "one.parquet")
    assert table.equals(pq.read_table(tmp_path / "two.parquet"))
    assert table.num_rows == figures["rows"] and figures["episodes"] == 500
    assert 0.3 < figures["won"] < 0.7
    assert min(table["goal"].to_pylist()) >= demonstrations.VALIDATION_GOALS
    assert set(table["catalogue_seed"].to_pylist()) == {1000, 1001}
    first = [row for row in table.slice(0, 40).to_pylist() if row["episode"] == 0]
    assert [row["step"] for row in first] == list(range(len(first)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.parquet", "two.parquet"]


def test_rows_can_be_left_out(tmp_path: Path) -> None:
    plan = DemonstrationPlan(episodes=40, skills=(ExpertSkill(skip_options=0.7),), catalogues=1, num_products=400)
    figures = demonstrations.write_demonstrations(tmp_path / "won.parquet", plan, keep=lambda step: step.won)
    table = pq.read_table(tmp_path / "won.parquet")
    assert 0 < table.num_rows < figures["rows"] and all(table["won"].to_pylist())


def test_bad_plans_say_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="episodes"):
        DemonstrationPlan(episodes=0)
    with pytest.raises(ValueError, match="num_products"):
        demonstrations.write_demonstrations(tmp_path / "x.parquet", DemonstrationPlan(episodes=1, num_products=8))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="skip_options"):
        demonstrations._read_skill(["skip=1"])
