from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from support import ByteTokenizer

from agent_system.reward_manager import EpisodeRewardManager
from verl.protocol import DataProto
from verl.utils.row_arrays import object_array

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
REWARDS = np.array([10.0, 0.0, 10.0, 5.0], dtype=np.float32)
EXPECTED = torch.tensor([[0, 0, 10.0, 0], [0, 0, 0, 0], [0, 0, 0, 10.0], [0, 0, 0, 0]])


def rows():
    return DataProto.from_dict(
        tensors={"responses": torch.full((4, 4), 70), "response_mask": MASK},
        non_tensors={
            "prompt_ids": object_array([np.array([70, 71])] * 4),
            "data_source": object_array(["text"] * 4),
            "episode_rewards": REWARDS,
            "episode_lengths": np.array([5, 1, 2, 1], dtype=np.float32),
        },
    )


def padded_rows():
    data = rows()
    tensors = {
        "prompts": torch.full((4, 3), 70),
        "responses": data.batch["responses"],
        "attention_mask": torch.cat([torch.ones(4, 3, dtype=torch.long), MASK], dim=1),
    }
    columns = {key: value for key, value in data.non_tensor_batch.items() if key != "prompt_ids"}
    return DataProto.from_dict(tensors=tensors, non_tensors=columns)


@pytest.mark.parametrize("make", [rows, padded_rows])
def test_the_episode_reward_stands_on_the_last_response_token_of_every_step(make):
    manager = EpisodeRewardManager(ByteTokenizer(), num_examine=0)
    scores = manager(make())
    assert scores.dtype == torch.float32
    assert torch.equal(scores, EXPECTED)
    both = manager(make(), return_dict=True)
    assert torch.equal(both["reward_tensor"], EXPECTED)
    assert both["reward_extra_info"] == {}


def test_the_reward_may_be_shared_among_the_steps():
    scores = EpisodeRewardManager(ByteTokenizer(), num_examine=0, normalize_by_length=True)(rows())
    assert scores.sum(-1).tolist() == [2.0, 0.0, 5.0, 0.0]


def test_scores_that_are_there_are_kept():
    data = rows()
    data.batch["rm_scores"] = torch.rand(4, 4)
    assert torch.equal(EpisodeRewardManager(ByteTokenizer(), num_examine=0)(data), data.batch["rm_scores"])


def test_an_own_score_replaces_the_episode_reward():
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        assert data_source == "text"
        return len(solution_str) + extra_info["episode_rewards"]

    scores = EpisodeRewardManager(ByteTokenizer(), num_examine=0, compute_score=compute_score)(rows())
    assert scores.sum(-1).tolist() == [13.0, 1.0, 14.0, 0.0]


def test_an_own_score_may_come_in_a_dict():
    manager = EpisodeRewardManager(ByteTokenizer(), num_examine=0, compute_score=lambda **_: {"score": 2, "why": "x"})
    assert manager(rows()).sum(-1).tolist() == [2.0, 2.0, 2.0, 0.0]


@pytest.mark.parametrize("score", [None, "0.5", {}, float("nan"), [1.0]])
def test_an_own_score_that_is_no_number_is_named(score):
    manager = EpisodeRewardManager(ByteTokenizer(), num_examine=0, compute_score=lambda **_: score)
    with pytest.raises(ValueError, match="custom_reward_function gave .*not a finite number"):
        manager(rows())


@pytest.mark.parametrize("make", [rows, padded_rows])
def test_at_most_num_examine_samples_are_logged(make, caplog):
    manager = EpisodeRewardManager(ByteTokenizer(), num_examine=2)
    with caplog.at_level(logging.INFO):
        for _ in range(50):
            manager(make())
    assert len(caplog.records) == 2
    assert "DDD" in caplog.text
