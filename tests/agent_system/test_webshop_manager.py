"""The WebShop manager on the real shop with a small generated catalogue."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support import answer, make_config, policy
from test_rollout import assert_same_rows, roll_out

from agent_system.environments.env_manager import make_envs
from agent_system.multi_turn_rollout.lock_step import LockStepAdapter
from verl.trainer.config.compose import default_config

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    shop = SimpleNamespace(
        num_products=200,
        validation_goals=40,
        cache_dir=str(tmp_path_factory.mktemp("shop")),
        seed=0,
        human_goals=False,
        data_dir=None,
        compat_seeding=False,
    )
    return make_config(env__webshop=shop, env__num_workers=2, env__history_length=1, data__max_prompt_length=8000)


@pytest.fixture(scope="module")
def managers(local_ray, config):
    train, val = make_envs(config)
    yield train, val
    val.close()
    train.close()


def hasty(prompt: str, seed: int) -> str:
    """Searches for the task, opens the seed's choice of the first results, buys it."""
    actions = [line[1:-2] for line in prompt.split("Possible actions: [\n")[1].split("\n]")[0].splitlines()]
    task = prompt.split("Task: ")[1].split("\n")[0].split(", and price")[0]
    products = [action for action in actions if action.startswith("click[b0")]
    if "search[<your query>]" in actions:
        return answer(f"search[{task}]")
    if products:
        return answer(products[seed % min(3, len(products))])
    return answer("click[buy now]") if "click[buy now]" in actions else answer("click[back to search]")


def test_a_shopper_gets_through_the_shop(config, managers):
    rows = roll_out(config, policy(hasty), managers[0])
    columns = rows.non_tensor_batch
    assert columns["is_action_valid"].all()
    assert columns["is_action_admissible"].all()
    scores = columns["webshop_task_score (not success_rate)"]
    assert 0 < scores.mean() <= 1
    assert ((columns["episode_rewards"] == 10) == (columns["success_rate"] == 1)).all()
    assert all(int(task.split("-")[1]) >= 40 for task in columns["task_id"])
    assert all(anchor.startswith("'") for anchor in columns["anchor_obs"])
    assert managers[0].split_digest == managers[1].split_digest != ""


def test_lock_step_and_event_driven_agree_on_the_real_shop(config, managers):
    val = managers[1]
    event_driven = roll_out(config, policy(hasty), val, is_train=False)
    adapter = LockStepAdapter(val, val.num_episodes, val.group_size)
    adapter.task_id = val.task_id
    lock_step = roll_out(config, policy(hasty), adapter, is_train=False)
    assert_same_rows(event_driven, lock_step)
    assert all(int(task.split("-")[1]) < 40 for task in lock_step.non_tensor_batch["task_id"])


def test_the_lock_step_contract(config, managers):
    train = managers[0]
    obs, infos = train.reset()
    assert obs["image"] is None
    assert len(obs["text"]) == len(obs["anchor"]) == len(infos) == 12
    assert obs["text"] == train.build_text_obs()
    assert len(set(obs["text"])) == 4  # a group shares its task
    assert not any(info["won"] for info in infos)
    outputs = [answer("search[shoe]")] * 11 + ["nonsense"]
    obs, rewards, dones, infos = train.step(outputs)
    assert rewards.tolist() == [0.0] * 12
    assert dones.tolist() == [False] * 12
    assert [bool(info["is_action_valid"]) for info in infos] == [True] * 11 + [False]
    assert "Page 1" in obs["anchor"][0]
    assert obs["anchor"][11] == "'Search'"
    with pytest.raises(ValueError, match="12 episodes"):
        train.step(outputs[:3])


def test_after_the_purchase_nothing_happens(config, managers):
    val = managers[1]
    val.reset()
    texts = val.build_text_obs()
    for turn in range(5):
        obs, rewards, dones, infos = val.step([hasty(text, 0) for text in texts])
        texts = obs["text"]
        if turn == 2:
            bought = dones.copy()
            scores = [info["task_score"] for info in infos]
    assert bought.any()
    assert rewards[bought].tolist() == [0.0] * bought.sum()
    assert dones[bought].all()
    assert [info["task_score"] for info in infos][: len(scores)] == pytest.approx(scores)


def test_the_goal_stream_resumes(config, managers):
    train = managers[0]
    state = train.state_dict()
    tasks = [train.envs.draw(range(4)) for _ in range(2)]
    train.load_state_dict(state)
    assert [train.envs.draw(range(4)) for _ in range(2)] == tasks


def test_compatible_seeding_gives_every_group_a_list_of_its_own(config, local_ray):
    shop = SimpleNamespace(**vars(config.env.webshop))
    shop.compat_seeding = True
    compatible = make_config(
        env__webshop=shop,
        env__num_workers=1,
        data__max_prompt_length=8000,
        data__train_batch_size=2,
        data__val_batch_size=2,
        env__rollout__n=2,
    )
    train, val = make_envs(compatible)
    rows = roll_out(compatible, policy(hasty), train)
    tasks = list(dict.fromkeys(rows.non_tensor_batch["task_id"]))
    assert [task.rsplit("-", 1)[0] for task in tasks] == ["seed-0-goal", "seed-1-goal"]
    val.close()
    train.close()


def test_too_many_tasks_for_the_shop(config, local_ray):
    greedy = make_config(env__webshop=config.env.webshop, data__val_batch_size=41, env__num_workers=1)
    train, val = make_envs(greedy)
    with pytest.raises(ValueError, match="there are 40 validation tasks"):
        val.reset()
    train.close()
    greedy = make_config(env__webshop=config.env.webshop, data__train_batch_size=9_999, env__num_workers=1)
    with pytest.raises(ValueError, match=r"too few for the 9999 tasks.*data\.train_batch_size"):
        make_envs(greedy)


def test_the_typed_configuration_has_every_key_that_is_read(tmp_path, local_ray):
    typed = default_config(
        "preset=embedded",
        "env.webshop.num_products=300",
        f"env.webshop.cache_dir={tmp_path}",
        "env.num_workers=1",
        "env.rollout.n=2",
        "env.max_steps=4",
        "data.train_batch_size=2",
        "data.val_batch_size=3",
        "data.max_prompt_length=4000",
        "data.max_response_length=200",
        "trainer.progress_bar=false",
    )
    train, val = make_envs(typed)
    for managers, is_train, episodes in ((train, True, 4), (val, False, 3)):
        rows = roll_out(typed, policy(hasty), managers, is_train=is_train)
        assert rows.meta_info["rollout_metrics"]["rollout/episodes"] == episodes
    val.close()
    train.close()
