"""Invalid-action penalty and KL in the reward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from algos_support import fixture_f

from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import AdaptiveKLController, FixedKLController, kl_penalty
from verl.trainer.ppo.penalties import apply_invalid_action_penalty, apply_kl_penalty, apply_overlong_penalty


def batch(valid: list[bool], admissible: list[bool] | None = None) -> DataProto:
    """Fixture F with validity columns; old and reference log-probs differ by 0.1, 0.2, … per token, NaN where masked."""
    rows = fixture_f()
    old = torch.arange(20).view(5, 4) / 10 - 3.0
    reference = torch.where(rows.mask.bool(), torch.full((5, 4), -3.0), torch.nan)
    columns = {"is_action_valid": np.array(valid)}
    if admissible is not None:
        columns["is_action_admissible"] = np.array(admissible)
    return DataProto.from_dict(
        tensors={
            "token_level_scores": rows.rewards,
            "response_mask": rows.mask,
            "step_rewards": rows.step_rewards,
            "old_log_probs": old,
            "ref_log_prob": reference,
        },
        non_tensors=columns,
    )


def test_only_the_offending_rows_are_hit_on_their_last_token() -> None:
    before = batch([True] * 5).batch["token_level_scores"].clone()
    data, metrics = apply_invalid_action_penalty(batch([True, False, True, False, True]), 0.1)
    change = data.batch["token_level_scores"] - before
    expected = torch.zeros(5, 4)
    expected[1, 1] = expected[3, 0] = -0.1
    torch.testing.assert_close(change, expected)
    assert data.batch["step_rewards"].tolist() == pytest.approx([9.5, 9.9, 0.0, -0.2, 10.0])
    assert metrics == {"episode/valid_action_ratio": 0.6}


@pytest.mark.parametrize(("penalise", "hit"), [(False, [0]), (True, [0, 2])])
def test_inadmissible_actions_are_hit_once_where_asked(penalise: bool, hit: list[int]) -> None:
    valid, admissible = [False, True, True, True, True], [False, True, False, True, True]
    before = batch(valid).batch["token_level_scores"].clone()
    data, metrics = apply_invalid_action_penalty(batch(valid, admissible), 0.5, penalise_inadmissible=penalise)
    change = (data.batch["token_level_scores"] - before).sum(-1)
    assert change.tolist() == pytest.approx([-0.5 if row in hit else 0.0 for row in range(5)])
    assert metrics == pytest.approx({"episode/valid_action_ratio": 0.8, "episode/admissible_action_ratio": 0.6})


def test_fillers_are_neither_hit_nor_counted() -> None:
    data = batch([True, False, True, True, True])
    data.batch["response_mask"][1] = 0
    before = data.batch["token_level_scores"].clone()
    data, metrics = apply_invalid_action_penalty(data, 0.1)
    assert torch.equal(data.batch["token_level_scores"], before) and metrics["episode/valid_action_ratio"] == 1.0


def test_kl_in_reward_by_hand() -> None:
    """k1 per token is .1 x position in the flat matrix: row means .1, .45, .95, 1.2, 1.7; their mean .88."""
    data, metrics = apply_kl_penalty(batch([True] * 5), FixedKLController(0.5), "kl")
    rewards = data.batch["token_level_rewards"]
    assert rewards[0].tolist() == pytest.approx([0.0, -0.05, 10.0 - 0.1, 0.0], abs=1e-5)
    assert rewards[3].tolist() == pytest.approx([-0.1 - 0.6, 0.0, 0.0, 0.0], abs=1e-5)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(np.mean([0.1, 0.45, 0.95, 1.2, 1.7]), abs=1e-5)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5
    assert data.batch["token_level_scores"][0, 1] == 0.0  # scores stay what they are


def test_the_controller_moves_after_its_value_was_used() -> None:
    controller = AdaptiveKLController(0.5, target_kl=0.1, horizon=100)
    data = batch([True] * 5)
    data.batch["response_mask"][4] = 0  # a filler: four rows count
    _, metrics = apply_kl_penalty(data, controller, "k3")
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5
    assert controller.value == pytest.approx(0.5 * (1 + 0.2 * 4 / 100))
    mask = data.batch["response_mask"].bool()
    kl = kl_penalty(data.batch["old_log_probs"], data.batch["ref_log_prob"], "k3")
    by_row = [float(kl[i][mask[i]].mean()) for i in range(4)]
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(np.mean(by_row), rel=1e-5)


def test_long_responses_are_fined_as_dapo_writes_it() -> None:
    """DAPO, eq. 13, with L_max = 10, L_cache = 4 and a factor of 2: nothing up to 6 tokens, then 0.5 a token."""
    lengths = torch.tensor([0, 3, 6, 7, 8, 9, 10])
    mask = (torch.arange(10) < lengths.unsqueeze(-1)).long()
    scores = mask * 0.25
    rows = DataProto.from_dict(
        {"token_level_scores": scores.clone(), "response_mask": mask, "step_rewards": torch.full((7,), 5.0)}
    )
    data, metrics = apply_overlong_penalty(rows, 10, 4, 2.0)
    fine = scores - data.batch["token_level_scores"]
    expected = torch.zeros(7, 10)
    expected[3, 6], expected[4, 7], expected[5, 8], expected[6, 9] = 0.5, 1.0, 1.5, 2.0
    torch.testing.assert_close(fine, expected)
    torch.testing.assert_close(data.batch["step_rewards"], 5.0 - expected.sum(-1))
    assert metrics == pytest.approx(
        {"response_length/overlong_share": 4 / 6, "response_length/overlong_penalty": 5.0 / 6}
    )
