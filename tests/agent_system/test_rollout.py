"""The rollout loop with a scripted policy on real Ray actors."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from support import EOS, ByteTokenizer, answer, make_config, policy, shell, shopper, toy_manager
from toy_shop import slow_for_some

from agent_system.multi_turn_rollout import TrajectoryCollector, episodes_to_records
from agent_system.multi_turn_rollout.episode import request_seed
from agent_system.multi_turn_rollout.lock_step import LockStepAdapter
from verl.utils.row_arrays import columns_equal

pytestmark = pytest.mark.usefixtures("local_ray")


def roll_out(config, client, envs, is_train=True, rows=None, step=3, **meta):
    collector = TrajectoryCollector(config, ByteTokenizer())
    rows = rows or (config.data.train_batch_size if is_train else config.data.val_batch_size)
    return collector.multi_turn_loop(shell(rows, global_steps=step, **meta), client, envs, is_train)


def test_the_bar_of_a_validation_names_it_and_its_block_where_there_are_several(capfd):
    config = make_config(trainer__progress_bar=True)
    envs, client = toy_manager(config, is_train=False), policy(shopper)
    for meta, label in (({"num_batches": 1}, "validation"), ({"num_batches": 3, "batch_index": 1}, "validation 2 of 3")):
        roll_out(config, client, envs, is_train=False, rows=1, step=4, **meta)
        assert f"{label}: 100%" in capfd.readouterr().err


def assert_same_rows(one, other):
    assert one.batch.keys() == other.batch.keys()
    for key in one.batch.keys():
        assert torch.equal(one.batch[key], other.batch[key]), key
    assert one.non_tensor_batch.keys() == other.non_tensor_batch.keys()
    for key, column in one.non_tensor_batch.items():
        assert columns_equal(column, other.non_tensor_batch[key]), key


def test_rows_are_the_record():
    config, tokenizer = make_config(), ByteTokenizer()
    client = policy(shopper)
    rows = roll_out(config, client, toy_manager(config))
    columns, metrics = rows.non_tensor_batch, rows.meta_info["rollout_metrics"]
    mask, responses = rows.batch["response_mask"], rows.batch["responses"]

    assert rows.meta_info | {"rollout_metrics": 0} == {
        "temperature": 1.0,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "rollout_metrics": 0,
    }
    episodes = list(dict.fromkeys(columns["traj_uid"]))
    assert episodes == [f"step3-group{g}-member{m}" for g in range(4) for m in range(3)]
    assert len(set(columns["task_id"])) == 4
    for name in episodes:
        mine = columns["traj_uid"] == name
        assert columns["step_index"][mine].tolist() == list(range(mine.sum()))
        assert set(columns["episode_lengths"][mine]) == {float(mine.sum())}
        assert set(columns["episode_rewards"][mine]) == {float(columns["rewards"][mine].sum())}
        assert columns["anchor_obs"][mine][0] == "'Search'"
        assert set(columns["success_rate"][mine]) == {float(columns["rewards"][mine].sum() == 10)}
    assert set(columns["webshop_task_score (not success_rate)"]) <= {0.0, 0.5, 1.0}

    lengths = mask.sum(-1)
    assert responses.shape[1] == lengths.max()
    assert torch.equal(mask, (torch.arange(responses.shape[1]) < lengths[:, None]).long())
    assert (responses[torch.arange(len(rows)), lengths - 1] == EOS).all()
    assert (responses[mask == 0] == 0).all()
    assert torch.equal(rows.batch["rollout_log_probs"], -0.5 * mask.float())
    assert rows.batch["prompt_length"].tolist() == [len(ids) for ids in columns["prompt_ids"]]
    assert {ids.dtype for ids in columns["prompt_ids"]} == {np.dtype(np.int32)}
    for prompt, turn in zip(columns["prompt_ids"], columns["step_index"], strict=True):
        text = tokenizer.decode(prompt)
        assert text.startswith("<user>You are")
        assert text.endswith("<agent>")
        assert f"Steps taken: {turn}." in text or turn == 0

    inadmissible = np.array(["click[z]" in tokenizer.decode(ids) for ids in responses.tolist()])
    assert inadmissible.any()
    assert (columns["is_action_admissible"] == ~inadmissible).all()
    assert columns["is_action_valid"].all()
    assert metrics["rollout/episodes"] == 12
    assert metrics["rollout/requests"] == len(rows)
    assert metrics["rollout/tokens"] == mask.sum()
    assert metrics["rollout/infra_failed"] == 0
    assert 0 <= metrics["rollout/engine_idle_share"] <= 1
    assert metrics["timing_rollout_s/weight_sync"] == 0.25


def test_finished_episodes_cost_nothing():
    config = make_config()
    client = policy(shopper)
    rows = roll_out(config, client, toy_manager(config))
    seen = client.requests_seen()
    assert len(seen) == len(set(seen)) == len(rows)
    assert len(set(rows.non_tensor_batch["episode_lengths"])) > 1  # they did end at different times


def test_rows_do_not_depend_on_timing():
    config = make_config()
    envs = toy_manager(config)
    reference = roll_out(config, policy(shopper), envs)
    hurried = make_config(actor_rollout_ref__rollout__max_steps_per_slice=8)
    other = roll_out(hurried, policy(shopper, replicas=3, step_s=0.002), toy_manager(hurried, builder=slow_for_some))
    assert_same_rows(reference, other)


def test_steps_have_seeds_and_tasks_of_their_own():
    config = make_config()
    envs = toy_manager(config)
    client = policy(shopper)
    third, fourth = roll_out(config, client, envs, step=3), roll_out(config, client, envs, step=4)
    assert set(third.non_tensor_batch["task_id"]).isdisjoint(fourth.non_tensor_batch["task_id"])
    assert set(third.non_tensor_batch["traj_uid"]).isdisjoint(fourth.non_tensor_batch["traj_uid"])
    assert request_seed(7, "train", 3, 0, 0, 1, 2) == request_seed(7, "train", 3, 0, 0, 1, 2)
    seeds = {
        request_seed(7, "train", s, g, 0, m, t) for s in range(9) for g in range(9) for m in range(9) for t in range(9)
    }
    assert len(seeds) == 9**4
    assert max(seeds) < 2**31


def test_the_lock_step_adapter_gives_the_same_rows():
    config = make_config()
    event_driven = roll_out(config, policy(shopper), toy_manager(config))
    manager = toy_manager(config)
    adapter = LockStepAdapter(manager, manager.num_episodes, manager.group_size)
    adapter.task_id = manager.task_id
    client = policy(shopper)
    lock_step = roll_out(config, client, adapter)
    for rows in (event_driven, lock_step):
        rows.non_tensor_batch.pop("task_id")  # a lock-step manager names no tasks
    assert_same_rows(event_driven, lock_step)
    assert len(client.requests_seen()) == len(lock_step)


def test_validation_is_the_same_every_time_and_blocks_differ():
    config = make_config()
    envs = toy_manager(config, is_train=False)
    client = policy(shopper)
    first = roll_out(config, client, envs, is_train=False, step=0, batch_index=0)
    second = roll_out(config, client, envs, is_train=False, step=0, batch_index=1, rows=4)
    again = roll_out(config, client, envs, is_train=False, step=20, batch_index=0)
    assert_same_rows(first, again)
    assert first.meta_info["temperature"] == 0.0
    tasks = [set(rows.non_tensor_batch["task_id"]) for rows in (first, second)]
    assert [len(each) for each in tasks] == [6, 4]
    assert tasks[0].isdisjoint(tasks[1])
    assert set(first.non_tensor_batch["traj_uid"]).isdisjoint(second.non_tensor_batch["traj_uid"])


def test_an_episode_ends_at_max_steps():
    config = make_config(env__max_steps=2)
    rows = roll_out(config, policy(shopper), toy_manager(config))
    assert set(rows.non_tensor_batch["episode_lengths"]) == {2.0}
    assert set(rows.non_tensor_batch["success_rate"]) == {0.0}


def test_a_response_that_is_cut_says_so():
    config = make_config(actor_rollout_ref__rollout__response_length=10)
    rows = roll_out(config, policy(shopper), toy_manager(config))
    assert set(rows.non_tensor_batch["finish_reason"]) == {"length"}
    assert rows.batch["responses"].shape[1] == 10
    assert not rows.non_tensor_batch["is_action_valid"].any()


def test_a_batch_that_does_not_fit_the_environments():
    config = make_config()
    envs = toy_manager(config)
    with pytest.raises(ValueError, match=r"15 episodes.*data\.train_batch_size"):
        roll_out(config, policy(shopper), envs, rows=5)


def test_whole_episodes_as_records():
    config = make_config()
    rows = roll_out(config, policy(shopper), toy_manager(config))
    records = episodes_to_records(rows, ByteTokenizer())
    assert [record["traj_uid"] for record in records] == list(dict.fromkeys(rows.non_tensor_batch["traj_uid"]))
    assert sum(len(record["steps"]) for record in records) == len(rows)
    for record in records:
        assert record["reward"] == sum(step["reward"] for step in record["steps"])
        assert record["length"] == len(record["steps"])
        assert record["steps"][0]["response"].startswith(answer("search[thing]"))


# ---------------------------------------------------------------------- prompts that are too long


def babbler(prompt, seed):
    return "<think></think><action>search[" + "w" * 150 + "]</action>"


def test_a_long_prompt_loses_history_first():
    config = make_config(data__truncation="shorten_history", data__max_prompt_length=620)
    rows = roll_out(config, policy(babbler), toy_manager(config))
    texts = [ByteTokenizer().decode(ids) for ids in rows.non_tensor_batch["prompt_ids"]]
    assert rows.batch["prompt_length"].max() <= 620
    assert set(rows.non_tensor_batch["episode_lengths"]) == {6.0}
    assert any("The last 1:" in text for text in texts)
    assert not any("The last 2:" in text for text in texts)
    assert rows.meta_info["rollout_metrics"]["rollout/prompts_shortened"] > 0


def test_an_episode_ends_where_even_the_bare_prompt_is_too_long():
    config = make_config(data__truncation="shorten_history", data__max_prompt_length=250)
    rows = roll_out(config, policy(shopper), toy_manager(config))
    assert rows.non_tensor_batch["prompt_overflow"].all()
    assert set(rows.non_tensor_batch["episode_lengths"]) == {1.0}
    assert rows.meta_info["rollout_metrics"]["rollout/prompt_overflow"] == 12


def test_a_validation_names_the_episodes_whose_first_prompt_does_not_fit(monkeypatch):
    config = make_config(data__truncation="shorten_history", data__max_prompt_length=620)
    envs = toy_manager(config, is_train=False)
    absorb, seen = envs.absorb, set()

    def long_task_in_slot_one(slot, raw):
        observation = absorb(slot, raw)
        if slot == 1 and slot not in seen:
            observation = dataclasses.replace(observation, prompt="w" * 700)
        seen.add(slot)
        return observation

    monkeypatch.setattr(envs, "absorb", long_task_in_slot_one)
    monkeypatch.setattr(envs, "shorter_prompt", lambda slot, history_length: None)
    rows = roll_out(config, policy(shopper), envs, is_train=False)
    names = {envs.task_id(slot) for slot in range(config.data.val_batch_size)}
    assert rows.meta_info["failed_without_rows"] == [(envs.task_id(1), "text")]
    assert set(rows.non_tensor_batch["task_id"]) == names - {envs.task_id(1)}


def _over_at_reset(monkeypatch, envs, slots):
    absorb, seen = envs.absorb, set()

    def over(slot, raw):
        first = slot not in seen
        seen.add(slot)
        observation = absorb(slot, raw)
        return dataclasses.replace(observation, done=True) if first and slot in slots else observation

    monkeypatch.setattr(envs, "absorb", over)


def test_an_episode_without_a_step_is_a_failure_in_validation_and_named(monkeypatch, caplog):
    config = make_config()
    envs = toy_manager(config, is_train=False)
    _over_at_reset(monkeypatch, envs, {1})
    rows = roll_out(config, policy(shopper), envs, is_train=False)
    assert rows.meta_info["failed_without_rows"] == [(envs.task_id(1), "text")]
    assert caplog.text.count("is left out, its environment says that it is over before its first step") == 1


def test_a_rollout_of_episodes_without_a_step_says_so(monkeypatch):
    config = make_config()
    envs = toy_manager(config)
    _over_at_reset(monkeypatch, envs, range(100))
    with pytest.raises(RuntimeError, match="none of the 12 episodes .* over before its first step"):
        roll_out(config, policy(shopper), envs)


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_a_long_prompt_can_be_cut(side):
    config = make_config(data__truncation=side, data__max_prompt_length=201)
    rows = roll_out(config, policy(lambda prompt, seed: answer("search[a]")), toy_manager(config))
    assert set(rows.batch["prompt_length"].tolist()) == {201}
    text = ByteTokenizer().decode(rows.non_tensor_batch["prompt_ids"][0])
    assert text.startswith("<user>") == (side != "left")
    assert text.endswith("<agent>") == (side != "right")


def test_a_long_prompt_is_an_error_if_so_wished():
    config = make_config(data__max_prompt_length=250)
    with pytest.raises(ValueError, match=r"data\.max_prompt_length is 250: raise it"):
        roll_out(config, policy(shopper), toy_manager(config))
    with pytest.raises(ValueError, match=r"data\.truncation=up"):
        TrajectoryCollector(make_config(data__truncation="up"), ByteTokenizer())
