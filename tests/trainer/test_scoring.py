"""What rows are paid: the reward model's place, ReMax's baselines, penalties after both, rows of an earlier policy."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agent_system.reward_manager import EpisodeRewardManager
from verl.protocol import DataProto
from verl.trainer.config import default_config
from verl.trainer.ppo.advantage import compute_advantage
from verl.trainer.ppo.rollout_check import keep_behaviour_of_carried_rows, rollout_gap_metrics
from verl.trainer.ppo.scoring import score_rows, take_baselines_apart
from verl.trainer.ppo.validation import validation_metrics


def rows_of(tasks: str, episodes: str, rewards: list[float], baselines: str = "", **columns: np.ndarray) -> DataProto:
    """One row per letter; responses of 2 tokens in a width of 3; ``baselines`` are the letters of greedy episodes."""
    count = len(tasks)
    mask = torch.tensor([[1, 1, 0]] * count)
    return DataProto.from_dict(
        tensors={
            "responses": torch.full((count, 3), 5),
            "response_mask": mask,
            "prompt_length": torch.full((count,), 2),
            "rollout_log_probs": -0.5 * mask.float(),
            "step_rewards": torch.ones(count),
        },
        non_tensors={
            "prompt_ids": np.array([np.array([3, 4])] * count + [None], dtype=object)[:-1],
            "uid": np.array(list(tasks), dtype=object),
            "traj_uid": np.array(list(episodes), dtype=object),
            "step_index": np.arange(count),
            "episode_rewards": np.array(rewards, dtype=np.float32),
            "episode_lengths": np.ones(count, dtype=np.float32),
            "is_action_valid": np.ones(count, dtype=bool),
            "is_baseline": np.array([letter in baselines for letter in episodes]),
            **columns,
        },
    )


def config_of(*overrides: str):
    return default_config("preset=embedded", "data.max_response_length=3", *overrides)


def paid(rows: DataProto, *overrides: str, **arguments) -> tuple[DataProto, dict[str, float]]:
    return score_rows(rows, EpisodeRewardManager(None, 0), config_of(*overrides), **arguments)


def test_remax_takes_the_greedy_episodes_reward_off_every_row_of_its_task():
    """Task g: episodes a (two steps, reward 10), b (0), greedy episode c (10, one step); task h: d (10), greedy e (0)."""
    rows = rows_of("ggggghh", "aabccde", [10, 10, 0, 10, 10, 10, 0], baselines="ce")
    rows, metrics = paid(rows)
    assert rows.non_tensor_batch["traj_uid"].tolist() == list("aabd")
    assert rows.batch["reward_baselines"].tolist() == [10, 10, 10, 0]
    assert metrics["remax/baseline_reward"] == 5.0
    assert "is_baseline" not in rows.non_tensor_batch
    rows.batch["token_level_rewards"] = rows.batch["token_level_scores"]
    result = compute_advantage(rows, config_of("algorithm.adv_estimator=remax").algorithm)
    assert result.batch["advantages"].tolist() == [[0, 0, 0], [0, 0, 0], [-10, -10, 0], [10, 10, 0]]


def test_the_baseline_knows_no_penalty_and_its_steps_count_nowhere():
    valid = np.array([False, True, False])
    rows, metrics = paid(rows_of("ggg", "abc", [10, 0, 10], baselines="c", is_action_valid=valid))
    assert rows.batch["reward_baselines"].tolist() == [10, 10]
    assert rows.batch["token_level_scores"].sum(-1).tolist() == pytest.approx([9.9, 0.0])
    assert metrics["episode/valid_action_ratio"] == 0.5


def test_a_baseline_judged_row_by_row_is_the_mean_over_its_episode():
    rows = rows_of("gggg", "abbb", [0] * 4, baselines="b")
    rows.batch["token_level_scores"] = torch.tensor([[0, 4, 0], [0, 1, 0], [0, 2, 0], [0, 6, 0]]).float()
    rows, _ = take_baselines_apart(rows)
    assert rows.batch["reward_baselines"].tolist() == [3.0]


def test_a_task_without_its_greedy_episode_is_left_out(caplog):
    rows, _ = paid(rows_of("gghi", "abcd", [10, 0, 10, 0], baselines="b"))
    assert rows.non_tensor_batch["uid"].tolist() == ["g"]
    assert "2 tasks are left out" in caplog.text
    with pytest.raises(RuntimeError, match="remax needs both"):
        paid(rows_of("gh", "ab", [1, 2], baselines="b"))


def test_the_reward_models_score_is_the_reward():
    calls = []

    def judge(rows: DataProto) -> DataProto:
        calls.append((len(rows), sorted(rows.non_tensor_batch)))
        scores = torch.zeros(len(rows), 3)
        scores[:, 1] = torch.arange(len(rows)) + 1.0
        return DataProto.from_dict(tensors={"rm_scores": scores})

    ranks = SimpleNamespace(world_size=2, compute_rm_score=judge)
    texts = np.array(["one", "two", "three"], dtype=object)
    rows, _ = paid(rows_of("ggg", "abc", [10, 0, 10], prompt_text=texts), rm_wg=ranks)
    assert calls == [(4, ["prompt_ids", "prompt_text"])]  # a row more, so that the ranks get equal shares
    assert rows.batch["token_level_scores"].tolist() == [[0, 1, 0], [0, 2, 0], [0, 3, 0]]
    assert "prompt_text" not in rows.non_tensor_batch


def test_penalties_are_taken_off_the_scores_and_not_off_the_models():
    rows = rows_of("gg", "ab", [10, 0])
    rows.batch["rm_scores"] = torch.tensor([[0, 2.0, 0], [0, 3.0, 0]])
    rows.non_tensor_batch["is_action_valid"][0] = False
    overlong = ["reward_model.overlong_buffer.enable=true", "reward_model.overlong_buffer.len=2"]
    rows, metrics = paid(rows, *overlong)
    assert rows.batch["token_level_scores"].sum(-1).tolist() == pytest.approx([2 - 0.1 - 0.5, 3 - 0.5])
    assert rows.batch["rm_scores"].sum(-1).tolist() == [2.0, 3.0]
    assert rows.batch["step_rewards"].tolist() == pytest.approx([0.4, 0.5])
    assert metrics["response_length/overlong_penalty"] == 0.5


def test_rows_of_an_earlier_policy_keep_its_log_probs():
    rows = rows_of("ggg", "abc", [1, 2, 3], policy_lag=np.array([0, 1, 0]))
    rows.batch["old_log_probs"] = torch.full((3, 3), -0.7) * rows.batch["response_mask"]
    assert rollout_gap_metrics(rows)["training/rollout_log_probs_diff_mean"] == pytest.approx(0.2)
    rows.batch["rollout_log_probs"][1] = torch.tensor([-3.0, -4.0, 0.0])
    assert rollout_gap_metrics(rows)["training/rollout_log_probs_diff_mean"] == pytest.approx(0.2)
    keep_behaviour_of_carried_rows(rows)
    assert rows.batch["old_log_probs"].tolist() == [
        pytest.approx([-0.7, -0.7, 0.0]), [-3.0, -4.0, 0.0], pytest.approx([-0.7, -0.7, 0.0])
    ]  # fmt: skip
    rows.non_tensor_batch["policy_lag"][:] = 1
    assert rollout_gap_metrics(rows) == {}


def test_the_validation_score_is_what_the_validations_reward_function_says():
    """Episode a has rows with scores 1 and 3, b one with 10: episodes count once, so the mean is (2 + 10) / 2."""
    rows = rows_of("ggh", "aab", [7, 7, 7], data_source=np.array(["shop"] * 3, dtype=object),
                   tool_callings=np.zeros(3), success_rate=np.array([1.0, 1.0, 0.0]))  # fmt: skip
    metrics = validation_metrics(rows, np.array([1.0, 3.0, 10.0]))
    assert metrics["val/shop/test_score"] == 6.0
    assert metrics["val/success_rate"] == 0.5
