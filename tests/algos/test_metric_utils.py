"""Metrics of a step and of a validation, on rows and on the padded form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from algos_support import objects

from verl.protocol import DataProto
from verl.trainer.ppo import metric_utils
from verl.trainer.ppo.metric_utils import (
    bootstrap_metric,
    calc_maj_val,
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    process_validation_metrics,
)


def row_batch(fillers: int = 0, **arrays: np.ndarray) -> DataProto:
    """Three rows of two trajectories, prompts of 4, 2 and 5 tokens, responses of 3, 1 and 2; then fillers."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]] + [[0, 0, 0]] * fillers)
    values = torch.arange(mask.numel(), dtype=torch.float32).view(mask.shape)
    count = len(mask)
    tensors = {
        "responses": torch.zeros_like(mask),
        "response_mask": mask,
        "prompt_length": torch.tensor([4, 2, 5] + [1] * fillers),
        "token_level_scores": torch.eye(count, 3) * mask,
        "token_level_rewards": torch.eye(count, 3) * mask * 2,
        "advantages": values * mask,
        "returns": values * mask,
        "values": (values - 1) * mask,
    }
    columns = {
        "traj_uid": objects(["x", "x", "y"] + ["filler"] * fillers),
        "episode_rewards": np.array([10, 10, 0] + [77] * fillers, dtype=np.float32),
        "episode_lengths": np.array([2, 2, 1] + [77] * fillers, dtype=np.float32),
        "tool_callings": np.array([3, 3, 1] + [77] * fillers, dtype=np.float32),
        "success_rate": np.array([1, 1, 0] + [77] * fillers, dtype=np.float32),
        "webshop_task_score (not success_rate)": np.array([1, 1, 0.5] + [77] * fillers, dtype=np.float32),
        "pick_success_rate": np.array([np.nan, np.nan, 1] + [77] * fillers, dtype=np.float32),
        "finish_reason": objects(["length", "stop", "stop"] + ["stop"] * fillers),
        **arrays,
    }
    return DataProto.from_dict(tensors=tensors, non_tensors=columns)


def test_data_metrics_by_hand() -> None:
    metrics = compute_data_metrics(row_batch(), use_critic=True, max_prompt_length=5, max_response_length=3)
    expected = {
        # the second row's one lies on a masked token
        "critic/score/mean": 1 / 3,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "critic/rewards/max": 2.0,
        # valid cells are 0 1 2, 3, 6 7
        "critic/advantages/mean": 19 / 6,
        "critic/returns/max": 7.0,
        "critic/values/min": -1.0,
        "critic/vf_explained_var": 1.0,  # off by a constant
        "response_length/mean": 2.0,
        "response_length/clip_ratio": 1 / 3,
        "prompt_length/mean": 11 / 3,
        "prompt_length/clip_ratio": 1 / 3,
        # over the two trajectories, not the three rows
        "episode/reward/mean": 5.0,
        "episode/length/mean": 1.5,
        "episode/tool_call_count/max": 3.0,
        "episode/success_rate": 0.5,
        "episode/webshop_task_score (not success_rate)": 0.75,
        "episode/pick_success_rate": 1.0,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)


def test_fillers_change_no_metric() -> None:
    assert compute_data_metrics(row_batch(fillers=3)) == compute_data_metrics(row_batch())


def test_without_a_limit_the_engine_tells_what_was_cut() -> None:
    metrics = compute_data_metrics(row_batch(), use_critic=False)
    assert metrics["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert "prompt_length/clip_ratio" not in metrics and "critic/values/mean" not in metrics


def test_the_padded_form_gives_the_same() -> None:
    rows = row_batch()
    lengths = rows.batch["prompt_length"]
    prompts = (torch.arange(5) >= 5 - lengths.unsqueeze(-1)).long()
    padded = row_batch()
    padded.batch["attention_mask"] = torch.cat([prompts, rows.batch["response_mask"]], dim=-1)
    padded.pop(batch_keys=["response_mask", "prompt_length"])
    assert compute_data_metrics(padded) == compute_data_metrics(rows, max_prompt_length=5, max_response_length=3)
    timing = {"gen": 1.0, "adv": 2.0}
    assert compute_timing_metrics(padded, timing) == compute_timing_metrics(rows, timing)


@pytest.mark.parametrize("fillers", [0, 2])
def test_timing_metrics_by_hand(fillers: int) -> None:
    """6 response tokens, 11 prompt tokens."""
    metrics = compute_timing_metrics(row_batch(fillers), {"gen": 0.6, "update_actor": 1.7, "testing": 5.0})
    expected = {
        "timing_s/gen": 0.6,
        "timing_s/update_actor": 1.7,
        "timing_s/testing": 5.0,
        "timing_per_token_ms/gen": 100.0,
        "timing_per_token_ms/update_actor": 100.0,
    }
    assert metrics == pytest.approx(expected)


def test_throughput_by_hand() -> None:
    data = row_batch()
    data.meta_info["global_token_num"] = [100, 200, 300]
    assert compute_throughout_metrics(data, {"step": 2.0}, n_gpus=3) == {
        "perf/total_num_tokens": 600,
        "perf/time_per_step": 2.0,
        "perf/throughput": 100.0,
    }


def test_a_batch_of_fillers_alone_has_no_metrics() -> None:
    data = row_batch(fillers=2).select_idxs(np.array([3, 4]))
    assert compute_data_metrics(data) == {}
    assert compute_timing_metrics(data, {"gen": 1.0}) == {"timing_s/gen": 1.0}


# --------------------------------------------------------------------------------------------- validation


def test_bootstrap_expectation() -> None:
    """Of two draws from {0, 1} the best is 1 with probability 3/4."""
    (best, worst) = bootstrap_metric([0.0, 1.0], 2, [np.max, np.min], n_bootstrap=4000)
    assert best == pytest.approx((0.75, 0.75**0.5 / 2), abs=0.03)
    assert worst[0] == pytest.approx(0.25, abs=0.03)
    assert bootstrap_metric([3.0], 5, [np.mean]) == [(3.0, 0.0)]
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_metric([], 2, [np.mean])


def test_majority_value() -> None:
    votes = [{"pred": "a", "val": 1.0}, {"pred": "b", "val": 2.0}, {"pred": "b", "val": 3.0}]
    assert calc_maj_val(votes, vote_key="pred", val_key="val") == 2.0
    assert calc_maj_val(votes[:2], vote_key="pred", val_key="val") == 1.0


def test_validation_statistics() -> None:
    result = process_validation_metrics(
        ["s", "s", "s", "s", "s", "other"],
        ["p", "p", "p", "p", "q", "p"],
        {
            "reward": [0.0, 1.0, 0.0, 1.0, 5.0, 7.0],
            "pred": ["x", "y", "x", "y", "z", "x"],
            "note": ["text"] * 6,
        },
    )
    assert set(result) == {"s", "other"} and set(result["s"]) == {"reward"}
    statistics = result["s"]["reward"]
    assert statistics["mean@4"] == 0.5 and statistics["std@4"] == 0.5 and statistics["mean@1"] == 5.0
    names = {f"{what}@{k}/{of}" for what in ("best", "worst", "maj") for k in (2, 4) for of in ("mean", "std")}
    assert set(statistics) == names | {"mean@4", "std@4", "mean@1"}
    assert statistics["best@2/mean"] == pytest.approx(0.75, abs=0.05)
    assert statistics["best@4/mean"] == pytest.approx(15 / 16, abs=0.05)
    assert statistics["worst@4/mean"] == pytest.approx(1 / 16, abs=0.05)
    assert result["other"] == {"reward": {"mean@1": 7.0}}


def test_reduce_metrics_is_deprecated() -> None:
    with pytest.warns(DeprecationWarning, match="verl.utils.metric"):
        reduced = metric_utils.reduce_metrics({"loss": [1.0, 3.0], "grad/max": [1.0, 3.0], "grad/min": [1.0, 3.0]})
    assert reduced == {"loss": 2.0, "grad/max": 3.0, "grad/min": 1.0}
