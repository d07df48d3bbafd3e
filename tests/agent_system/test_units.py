"""Small parts of the rollout: encoder, clients and the helpers of the reference."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import ByteTokenizer, make_config, shell

from agent_system.environments.base import EnvironmentManagerBase, to_numpy
from agent_system.multi_turn_rollout import TrajectoryCollector
from agent_system.multi_turn_rollout.generation import WorkerGroupClient, as_generation_client
from agent_system.multi_turn_rollout.lock_step import LockStepAdapter
from agent_system.multi_turn_rollout.prompt_encoder import PromptEncoder, truncate
from agent_system.multi_turn_rollout.utils import (
    adjust_batch,
    filter_group_data,
    numpy_to_torch,
    process_image,
    to_list_of_dict,
    torch_to_numpy,
)
from verl.protocol import DataProto
from verl.utils.row_arrays import object_array

IDS = np.arange(10, dtype=np.int32)


@pytest.mark.parametrize(
    ("side", "kept"), [("left", [5, 6, 7, 8, 9]), ("right", [0, 1, 2, 3, 4]), ("middle", [0, 1, 7, 8, 9])]
)
def test_truncation(side, kept):
    assert truncate(IDS, 5, side).tolist() == kept
    assert truncate(IDS, 10, side) is IDS
    assert len(truncate(IDS, 9, side)) == 9


def test_truncation_as_an_error_says_what_to_change():
    with pytest.raises(ValueError, match=r"10 tokens, data\.max_prompt_length is 5"):
        truncate(IDS, 5, "error")


def test_the_encoder_drops_as_little_history_as_it_must():
    encoder = PromptEncoder(
        ByteTokenizer(), max_length=40, truncation="shorten_history", template_kwargs={}, history_length=4
    )
    asked = []

    def shorter(length):
        asked.append(length)
        return "x" * (10 * length)

    ids = encoder.fit(encoder.encode(["x" * 40])[0], shorter)
    assert asked == [3, 2]
    assert len(ids) == 20 + len("<user><agent>")
    assert encoder.fit(encoder.encode(["x" * 40])[0], lambda length: "y" * 30) is None
    assert encoder.fit(encoder.encode(["x" * 40])[0], lambda length: None) is None
    assert encoder.shortened == 3


class FakeGroup:
    """Four ranks: two replicas of two."""

    def __init__(self):
        self.calls = []

    def rollout_layout(self):
        return [(0, 0), (0, 1), (1, 0), (1, 1)]

    def begin_rollout(self):
        free = "perf/memory_gb/rollout/free"
        return [
            {"timing_rollout_s/weight_sync": 0.1, free: 2.0},
            {"timing_rollout_s/weight_sync": 0.3, free: 1.0},
            {},
            {},
        ]

    def execute_ranks_async(self, ranks, method, *args):
        self.calls.append((ranks, method, args))
        return [f"ref{rank}" for rank in ranks]

    def get(self, refs, method):
        return f"{method} {refs}"


def test_every_rank_of_a_replica_gets_the_call_and_its_first_answers(monkeypatch):
    monkeypatch.setattr("ray.wait", lambda refs, num_returns, timeout: ([], refs))
    group = FakeGroup()
    client = as_generation_client(group)
    assert isinstance(client, WorkerGroupClient)
    assert client.num_replicas == 2
    assert client.begin() == {"timing_rollout_s/weight_sync": 0.3, "perf/memory_gb/rollout/free": 1.0}
    assert client.submit(1, ["request"], 16) == "ref2"
    assert client.receive("ref2") == "rollout_step ref2"
    assert group.calls == [([2, 3], "rollout_step", (["request"], 16))]
    assert as_generation_client(client) is client


class LockStepManager:
    """A manager of four episodes that notes what it is given."""

    def reset(self, kwargs):
        self.kwargs, self.actions = kwargs, []
        return {"text": ["go"] * 4, "image": None, "anchor": None}, [{}] * 4

    def step(self, actions):
        self.actions.append(actions)
        return {"text": ["on"] * 4, "image": None, "anchor": None}, np.zeros(4), np.zeros(4, bool), [{}] * 4


def test_a_lock_step_manager_gets_all_its_actions_when_fewer_episodes_play(monkeypatch):
    monkeypatch.setattr("ray.put", lambda value: value)
    manager = LockStepManager()
    adapter = LockStepAdapter(manager, num_episodes=2, group_size=1, capacity=4)
    (observations,) = adapter.begin([0, 1], [{"task": 0}, {"task": 1}])
    assert manager.kwargs == [{"task": 0}, {"task": 1}, {"task": 1}, {"task": 1}]
    assert [slot for slot, _ in observations] == [0, 1]
    assert adapter.submit_steps([(1, "b")]) == []
    (observations,) = adapter.submit_steps([(0, "a")])
    assert manager.actions == [["a", "b", "", ""]]
    assert [slot for slot, _ in observations] == [0, 1]


@pytest.mark.parametrize("is_train", [True, False])
def test_added_sampling_keys_reach_training_and_validation(is_train):
    config = make_config(actor_rollout_ref__rollout__extra={"min_p": 0.1})
    config.actor_rollout_ref.rollout.val_kwargs.extra = {"seed_offset": 3}
    envs = SimpleNamespace(num_episodes=6, group_size=1)
    plan = TrajectoryCollector(config, ByteTokenizer())._plan(shell(6), envs, 6, 1, is_train, True)
    assert plan.sampling.extra == ({"min_p": 0.1} if is_train else {"min_p": 0.1, "seed_offset": 3})
    assert plan.sampling.temperature == (1.0 if is_train else 0.0)
    plan = TrajectoryCollector(config, ByteTokenizer())._plan(shell(6, do_sample=False), envs, 6, 1, True, True)
    assert plan.sampling.greedy


def test_to_numpy():
    assert to_numpy(torch.ones(2)).tolist() == [1, 1]
    assert to_numpy([1, 2]).tolist() == [1, 2]
    assert to_numpy(True).item() is True
    assert to_numpy(IDS) is IDS
    with pytest.raises(ValueError, match="dict"):
        to_numpy({})


def test_the_base_manager_finds_the_last_active_step():
    manager = EnvironmentManagerBase(None, None, None)
    rows = [[{"active_masks": True}, {"active_masks": True}, {"active_masks": False}], [{"active_masks": True}]]
    infos = [[{"won": False}, {"won": True}, {"won": False}], [{"won": False}]]
    success = manager.success_evaluator(total_infos=infos, total_batch_list=rows)
    assert success["success_rate"].tolist() == [1.0, 0.0]


def numbered(rows):
    return DataProto.from_dict(
        tensors={"row": torch.arange(rows)}, non_tensors={"uid": object_array([str(i) for i in range(rows)])}
    )


@pytest.mark.parametrize(("mode", "rows"), [("copy", 96), ("delete", 64)])
def test_adjust_batch_makes_rows_divide(mode, rows):
    adjusted = adjust_batch(make_config(), numbered(70), mode)
    assert len(adjusted) == rows
    values = adjusted.batch["row"].tolist()
    assert len(set(values)) == min(70, rows)
    assert values[:64] == sorted(values[:64])
    assert adjusted.non_tensor_batch["uid"].tolist() == [str(value) for value in values]


def test_adjust_batch_with_few_rows_or_unset_sizes():
    few = adjust_batch(make_config(), numbered(5))
    counts = np.bincount(few.batch["row"].numpy())
    assert len(few) == 32
    assert counts.max() - counts.min() <= 1
    unset = SimpleNamespace(log_prob_micro_batch_size_per_gpu=None)
    assert len(adjust_batch(make_config(actor_rollout_ref__ref=unset), numbered(32))) == 32
    with pytest.raises(ValueError, match="copy or delete"):
        adjust_batch(make_config(), numbered(70), "pad")


def test_filter_group_data_drops_groups_without_a_difference():
    rows = [[{"row": i}] for i in range(6)]
    rewards = np.array([0, 0, 10, 0, 10, 10])
    success = {"success_rate": rewards / 10, "text_success_rate": np.array([0.5])}
    arguments = (rows, rewards, np.arange(6), success, np.array(list("abcdef")), np.zeros(6))
    config = SimpleNamespace(env=SimpleNamespace(rollout=SimpleNamespace(n=2)))
    kept, kept_rewards, lengths, kept_success, uids, calls = filter_group_data(*arguments, config)
    assert kept == rows[2:4]
    assert kept_rewards.tolist() == [10, 0]
    assert lengths.tolist() == [2, 3]
    assert list(kept_success) == ["success_rate"]
    assert uids.tolist() == ["c", "d"]
    assert calls.tolist() == [0, 0]
    assert filter_group_data(*arguments, config, last_try=True)[0] is rows


def test_conversions():
    assert torch_to_numpy(torch.ones(2), is_object=True).dtype == object
    assert numpy_to_torch(np.ones(2)).tolist() == [1, 1]
    assert [row["row"].item() for row in to_list_of_dict(numbered(3))] == [0, 1, 2]
    for convert in (torch_to_numpy, numpy_to_torch):
        with pytest.raises(ValueError, match="list"):
            convert([1])


def test_images_are_scaled_into_the_allowed_area():
    small = process_image(np.random.default_rng(0).random((64, 64, 3)) * 0.9)
    assert small.size == (256, 256)
    assert small.mode == "RGB"
    assert process_image(np.full((300, 300, 3), 255, dtype=np.uint8)).size == (300, 300)
    assert process_image(torch.full((100, 400, 3), 9), max_pixels=100 * 100).size == (200, 50)
