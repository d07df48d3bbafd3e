"""The trainer's call: every estimator by name, its inputs checked; a user's own; PF-PPO."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from algos_support import algorithm_config, fixture_f, objects

from verl.protocol import DataProto
from verl.trainer.ppo.advantage import (
    AdvantageEstimator,
    AdvantageInputs,
    adv_estimator_names,
    compute_advantage,
    compute_response_mask,
    get_adv_estimator_fn,
    register_adv_est,
)
from verl.trainer.ppo.core_algos import compute_pf_ppo_reweight_data
from verl.trainer.ppo.pf_ppo import pf_ppo_weights
from verl.trainer.ppo.policy_loss import get_policy_loss_fn
from verl.utils.external_lib import import_external_lib


def batch(**arrays: np.ndarray) -> DataProto:
    """Fixture F as the trainer holds it, with everything any estimator asks for; pass@k wants no group of one."""
    rows = fixture_f()
    tensors = {
        "token_level_rewards": rows.rewards,
        "token_level_scores": rows.rewards.clone(),
        "response_mask": rows.mask,
        "step_rewards": rows.step_rewards,
        "values": torch.full(rows.mask.shape, 0.5),
        "mini_batch": torch.tensor([0, 0, 1, 1, 2]),
    }
    columns = {
        "uid": rows.uid,
        "traj_uid": rows.traj_uid,
        "anchor_obs": rows.anchors,
        "reward_baselines": np.full(5, 2.0, dtype=np.float32),
        **arrays,
    }
    return DataProto.from_dict(tensors=tensors, non_tensors=columns)


def test_every_shipped_name_is_registered() -> None:
    assert adv_estimator_names() == sorted(member.value for member in AdvantageEstimator)
    for member in AdvantageEstimator:
        assert get_adv_estimator_fn(member) is get_adv_estimator_fn(member.value)


@pytest.mark.parametrize("name", [member.value for member in AdvantageEstimator])
@pytest.mark.parametrize("cross_steps", [True, False])
def test_every_estimator_writes_finite_masked_advantages(name: str, cross_steps: bool) -> None:
    data = batch()
    if name == "grpo_passk":
        data = data.select_idxs(np.arange(4))
    result = compute_advantage(data, algorithm_config(name, compute_mean_std_cross_steps=cross_steps))
    mask = result.batch["response_mask"].bool()
    for key in ("advantages", "returns"):
        column = result.batch[key]
        assert column.shape == mask.shape and column.dtype == torch.float32 and torch.isfinite(column).all()
        assert not column[~mask].any()
    assert ("gigpo/singleton_share" in result.meta_info["advantage_metrics"]) == (name == "gigpo")


def test_gigpo_takes_its_settings() -> None:
    config = algorithm_config("gigpo")
    assert compute_advantage(batch(), config).batch["advantages"][:, 0].tolist() == pytest.approx(
        [9.8, 4.95, -9.7, -5.05, 10.0]
    )
    config.gigpo.mode, config.gigpo.step_advantage_w = "mean_std_norm", 0.0
    advantages = compute_advantage(batch(), config).batch["advantages"][:, 0].tolist()
    assert advantages == pytest.approx([0.874642, 0.857322, -0.857322, -0.874642, 9.99999], abs=1e-6)


def test_remax_subtracts_the_greedy_episode() -> None:
    advantages = compute_advantage(batch(), algorithm_config("remax")).batch["advantages"]
    assert advantages[0].tolist() == pytest.approx([8.0, 8.0, 8.0, 0.0])


@pytest.mark.parametrize(
    ("name", "missing"),
    [("gae", "values"), ("gigpo", "step_rewards"), ("hgpo", "anchor_obs"), ("remax", "reward_baselines")],
)
def test_a_missing_column_is_named_with_its_source(name: str, missing: str) -> None:
    data = batch()
    if missing in data.batch.keys():
        data.pop(batch_keys=[missing])
    else:
        data.pop(non_tensor_batch_keys=[missing])
    remedy = ".*critic.enable=true" if missing == "values" else ""
    with pytest.raises(ValueError, match=f"adv_estimator={name} needs '{missing}' in the batch: {remedy}"):
        compute_advantage(data, algorithm_config(name))


@pytest.mark.parametrize("name", ["grpo", "gigpo", "gae", "remax"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_names_its_trajectory(name: str, bad: float) -> None:
    data = batch()
    data.batch["token_level_rewards"][2, 1] = bad
    with pytest.raises(ValueError, match="token_level_rewards.*trajectory t2 .row 2"):
        compute_advantage(data, algorithm_config(name))


def test_garbage_at_masked_positions_is_ignored() -> None:
    data = batch()
    for key in ("token_level_rewards", "values"):
        data.batch[key][~data.batch["response_mask"].bool()] = float("nan")
    for name in ("gae", "grpo", "reinforce_plus_plus", "remax"):
        assert torch.isfinite(compute_advantage(data, algorithm_config(name)).batch["advantages"]).all()


def test_other_values_that_are_not_finite_are_named() -> None:
    data = batch()
    data.batch["step_rewards"][4] = float("nan")
    with pytest.raises(ValueError, match="step_rewards.*trajectory t3"):
        compute_advantage(data, algorithm_config("gigpo"))
    data = batch()
    data.batch["values"][0, 0] = float("nan")
    with pytest.raises(ValueError, match="critic's value.*trajectory t1"):
        compute_advantage(data, algorithm_config("gae"))


def test_the_earliest_step_stands_for_a_trajectory_in_any_order() -> None:
    config = algorithm_config("grpo", compute_mean_std_cross_steps=False)
    data = batch(step_index=np.array([0, 1, 0, 1, 0]))
    expected = compute_advantage(data, config).batch["advantages"]
    order = np.array([3, 1, 4, 2, 0])
    torch.testing.assert_close(
        compute_advantage(batch(step_index=np.array([0, 1, 0, 1, 0])).select_idxs(order), config).batch["advantages"],
        expected[order],
    )


def test_unknown_estimator_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match="algorithm.adv_estimator='ppo'.*gigpo, grpo.*external_lib"):
        compute_advantage(batch(), algorithm_config("ppo"))


def test_a_name_cannot_be_taken_twice() -> None:
    with pytest.raises(ValueError, match="already registered"):
        register_adv_est("gae")(lambda inputs: None)


def test_response_mask_of_the_padded_form() -> None:
    attention = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    data = DataProto.from_dict(tensors={"attention_mask": attention, "responses": torch.zeros(2, 2, dtype=torch.long)})
    assert compute_response_mask(data).tolist() == [[1, 0], [1, 1]]


# --------------------------------------------------------------------------------------------- a user's own file


OWN_FILE = '''
"""An estimator and a loss of one's own."""
from verl.trainer.ppo.core_algos import PolicyLossOutput, register_adv_est, register_policy_loss

@register_adv_est("sign")
def sign_of_the_score(inputs):
    inputs.metrics["sign/rows"] = float(len(inputs.index))
    advantages = inputs.scores().sign().unsqueeze(-1) * inputs.response_mask
    return advantages, advantages

@register_policy_loss("plain_ratio")
def plain_ratio(old_log_prob, log_prob, advantages, response_mask, config):
    return PolicyLossOutput(loss=-advantages * (log_prob - old_log_prob).exp())
'''


def test_a_users_file_needs_a_decorator_and_a_key(tmp_path: Path) -> None:
    path = tmp_path / "own_algorithms.py"
    path.write_text(OWN_FILE)
    first = import_external_lib(str(path))
    assert import_external_lib([str(path)]) == first  # once per process
    result = compute_advantage(batch(), algorithm_config("sign"))
    assert result.batch["advantages"][:, 0].tolist() == [1.0, 1.0, 0.0, -1.0, 1.0]
    assert result.meta_info["advantage_metrics"] == {"sign/rows": 5.0}
    ones = torch.ones(1, 2)
    assert get_policy_loss_fn("plain_ratio")(ones, ones, ones, ones, None).loss.tolist() == [[-1.0, -1.0]]


def test_the_file_in_the_docs_works(tmp_path: Path) -> None:
    docs = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"
    block, with_critic = re.findall(r"```python\n(.*?)```", docs.read_text(), flags=re.DOTALL)
    path = tmp_path / "my_algorithms.py"
    path.write_text(block.replace('"sign"', '"sign_of_the_docs"') + with_critic)
    import_external_lib(str(path))
    result = compute_advantage(batch(), algorithm_config("sign_of_the_docs"))
    assert result.batch["advantages"][:, 0].tolist() == [1.0, 1.0, 0.0, -1.0, 1.0]
    assert result.meta_info["advantage_metrics"] == pytest.approx({"sign/positive": 0.6})
    result = compute_advantage(batch(), algorithm_config("above_value"))  # every value is 0.5, scores differ by row
    assert result.batch["returns"][:, 0].tolist() == result.batch["token_level_rewards"].sum(-1).tolist()
    gaps = result.batch["returns"] - result.batch["advantages"]
    assert torch.equal(gaps, 0.5 * result.batch["response_mask"])
    old, new, ones = torch.zeros(1, 2), torch.tensor([[0.5, 0.0]]), torch.ones(1, 2)
    loss = get_policy_loss_fn("soft_ratio")(old, new, ones, ones, None).loss
    assert loss.tolist()[0] == pytest.approx([-math.tanh(0.5), 0.0])


def test_external_lib_says_what_is_wrong(tmp_path: Path) -> None:
    assert import_external_lib(None) == []
    with pytest.raises(ValueError, match="there is no file"):
        import_external_lib(str(tmp_path / "missing.py"))
    with pytest.raises(ValueError, match="no_such_module_anywhere"):
        import_external_lib("no_such_module_anywhere")
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    with pytest.raises(ValueError, match="broken.py fails with ZeroDivisionError"):
        import_external_lib(str(broken))


ONES = torch.ones(5, 4)  # as large as fixture F
WRONG_RESULTS = {
    "nothing": (None, "returned NoneType, not the pair"),
    "one_tensor": (ONES, "returned Tensor, not the pair"),
    "a_value_per_row": ((ONES[:, 0], ONES[:, 0]), r"advantages as a torch.float32 tensor \(5,\).*\(5, 4\)"),
    "integers": ((ONES, ONES.long()), "returns as a torch.int64 tensor"),
    "lists": ((ONES.tolist(), ONES), "advantages as "),
    "not_a_number": ((ONES, torch.full((5, 4), math.nan)), "what it returned as returns is nan in trajectory t1"),
}


@pytest.mark.parametrize("name", WRONG_RESULTS)
def test_an_own_estimator_that_returns_something_else_is_named(name: str) -> None:
    result, said = WRONG_RESULTS[name]
    register_adv_est(f"test_returns_{name}")(lambda inputs: result)
    with pytest.raises(ValueError, match=f"algorithm.adv_estimator=test_returns_{name}.*{said}"):
        compute_advantage(batch(), algorithm_config(f"test_returns_{name}"))


def test_what_an_own_estimator_says_of_masked_positions_does_not_matter() -> None:
    register_adv_est("test_fills_everything")(
        lambda inputs: (torch.where(inputs.response_mask.bool(), 2.0, math.nan),) * 2
    )
    data = compute_advantage(batch(), algorithm_config("test_fills_everything"))
    assert torch.equal(data.batch["advantages"], 2.0 * data.batch["response_mask"])


def test_an_estimator_sees_further_columns() -> None:
    data = batch(difficulty=objects(range(5)))

    @register_adv_est("test_reads_a_column")
    def estimator(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
        weights = torch.from_numpy(inputs.array("difficulty", "a test").astype(np.float32))
        advantages = weights.unsqueeze(-1) * inputs.response_mask
        return advantages, advantages

    advantages = compute_advantage(data, algorithm_config("test_reads_a_column")).batch["advantages"]
    assert advantages[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


# --------------------------------------------------------------------------------------------- PF-PPO


def test_pf_ppo_weights_by_hand() -> None:
    scores = torch.tensor([-2.0, 0.0, 3.0])
    assert pf_ppo_weights(scores, "pow", 2.0).tolist() == pytest.approx([4.0, 0.0, 9.0], abs=1e-6)
    assert pf_ppo_weights(scores, "max_min", 2.0).tolist() == pytest.approx([1.0, 0.0, 1.0], abs=1e-6)
    assert pf_ppo_weights(scores, "max_random", 2.0).tolist() == pytest.approx([0.1, 0.1, 0.4], abs=1e-6)
    with pytest.raises(ValueError, match="algorithm.pf_ppo.reweight_method"):
        pf_ppo_weights(scores, "best", 2.0)


def test_pf_ppo_draws_good_rows_into_the_same_plan() -> None:
    data = batch()
    data.batch["response_mask"][3] = 0  # a filler
    drawn = compute_pf_ppo_reweight_data(data, "max_min", 1.0)
    again = compute_pf_ppo_reweight_data(data, "max_min", 1.0)
    assert len(drawn) == 5 and drawn.batch["mini_batch"].tolist() == [0, 0, 1, 1, 2]
    assert drawn.non_tensor_batch["traj_uid"].tolist() == again.non_tensor_batch["traj_uid"].tolist()
    assert int(drawn.batch["response_mask"][3].sum()) == 0
    scores = drawn.batch["token_level_scores"].sum(-1)[[0, 1, 2, 4]].tolist()
    assert set(scores) <= {10.0, 0.0}  # the highest and the lowest of the real rows


def test_pf_ppo_works_through_the_config() -> None:
    result = compute_advantage(batch(), algorithm_config("gae", use_pf_ppo=True))
    assert len(result) == 5 and torch.isfinite(result.batch["advantages"]).all()
