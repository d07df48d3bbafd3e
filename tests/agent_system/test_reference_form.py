"""The padded form that code written against the reference's collector uses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import ByteTokenizer, make_config, policy, shell, shopper, toy_manager
from test_rollout import roll_out

from agent_system.multi_turn_rollout import TrajectoryCollector, filter_group_data
from agent_system.reward_manager import EpisodeRewardManager

PROMPT_LENGTH, RESPONSE_LENGTH = 1200, 200


def test_an_observation_as_a_padded_prompt():
    collector = TrajectoryCollector(make_config(data__max_prompt_length=20), ByteTokenizer())
    obs = {"text": ["look", "go on"], "image": None, "anchor": ["a", "b"]}
    batch = collector.preprocess_batch(shell(2), obs)
    assert batch.batch["input_ids"].shape == (2, 20)
    assert batch.batch["attention_mask"].sum(-1).tolist() == [17, 18]
    assert batch.batch["position_ids"][0].tolist() == [0, 0, 0, *range(17)]
    assert ByteTokenizer().decode(batch.batch["input_ids"][1]) == "<user>go on<agent>"
    assert batch.non_tensor_batch["raw_prompt_ids"][0] == ByteTokenizer().encode("<user>look<agent>")
    assert batch.non_tensor_batch["raw_prompt"][1] == [{"role": "user", "content": "go on"}]
    assert batch.non_tensor_batch["anchor_obs"].tolist() == ["a", "b"]
    with pytest.raises(ValueError, match=r"data\.max_prompt_length is 20"):
        collector.preprocess_single_sample(0, shell(1), obs | {"text": ["x" * 20]})
    with pytest.raises(ValueError, match="no text"):
        collector.preprocess_single_sample(0, shell(1), {"text": None, "image": [1], "anchor": None})


@pytest.mark.usefixtures("local_ray")
def test_the_padded_rollout_holds_the_same_rows():
    config = make_config(data__max_prompt_length=PROMPT_LENGTH)
    ragged = roll_out(config, policy(shopper), toy_manager(config))
    collector = TrajectoryCollector(config, ByteTokenizer())
    repeated = shell(4, global_steps=3).repeat(3, interleave=True)
    rollout = collector.vanilla_multi_turn_loop(repeated, policy(shopper), toy_manager(config))
    episodes, rewards, lengths, success, uids, calls = rollout
    assert [len(rows) for rows in episodes] == lengths.tolist()
    assert uids.tolist() == list(dict.fromkeys(ragged.non_tensor_batch["traj_uid"]))
    assert set(success) == {"success_rate", "webshop_task_score (not success_rate)"}
    assert len(rewards) == len(calls) == 12

    padded = collector.gather_rollout_data(*rollout)
    tensors, mask = padded.batch, padded.batch["attention_mask"]
    assert tensors["input_ids"].shape == mask.shape == (len(ragged), PROMPT_LENGTH + RESPONSE_LENGTH)
    assert torch.equal(mask[:, :PROMPT_LENGTH].sum(-1), ragged.batch["prompt_length"])
    assert torch.equal(mask[:, PROMPT_LENGTH:].sum(-1), ragged.batch["response_mask"].sum(-1))
    width = ragged.batch["responses"].shape[1]
    assert torch.equal(tensors["responses"][:, :width], ragged.batch["responses"])
    assert (tensors["rollout_log_probs"][mask[:, PROMPT_LENGTH:] == 0] == -1).all()
    real = tensors["position_ids"][mask.bool()]
    assert torch.equal(real, torch.cat([torch.arange(n) for n in mask.sum(-1).tolist()]))
    for key in ("rewards", "episode_rewards", "success_rate", "step_index"):
        assert padded.non_tensor_batch[key].astype(float).tolist() == ragged.non_tensor_batch[key].tolist()

    scores = EpisodeRewardManager(ByteTokenizer(), num_examine=0)
    assert torch.equal(scores(padded).sum(-1), scores(ragged).sum(-1))
    kept = filter_group_data(*rollout, config)
    assert len(kept[0]) % 3 == 0
    assert len(kept[0]) == len(kept[1]) <= 12


@pytest.mark.usefixtures("local_ray")
def test_the_dynamic_loop_replaces_groups():
    config = make_config(env__rollout__n=2, algorithm__filter_groups__enable=True)
    collector = TrajectoryCollector(config, ByteTokenizer())
    repeated = shell(4, global_steps=3).repeat(2, interleave=True)
    _, rewards, _, _, uids, _ = collector.dynamic_multi_turn_loop(repeated, policy(shopper), toy_manager(config))
    pairs = rewards.reshape(-1, 2)
    last_try = np.array(["attempt2" in uid for uid in uids[::2]])
    assert ((pairs[:, 0] != pairs[:, 1]) | last_try).all()
