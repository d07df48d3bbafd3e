"""From rewards to advantages: the one call that the trainer makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gigpo.core_gigpo import check_finite
from verl.trainer.ppo.advantage.registry import AdvantageEstimator, AdvantageInputs, get_adv_estimator_fn
from verl.trainer.ppo.pf_ppo import compute_pf_ppo_reweight_data

if TYPE_CHECKING:
    from verl.protocol import DataProto


def compute_response_mask(data: DataProto) -> torch.Tensor:
    """(rows, response_length): the batch's `response_mask`, or the tail of `attention_mask` in the padded form."""
    if "response_mask" in data.batch.keys():
        return data.batch["response_mask"]
    return data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :]


def compute_advantage(data: DataProto, config: Any) -> DataProto:
    """Write `advantages` and `returns` with the estimator that `config.adv_estimator` names.

    Args:
        data: rows with `token_level_rewards` (rows, response_length), `response_mask`, `uid`, `traj_uid`, and what the
            estimator needs besides: `values` (gae, or with `critic.enable`), `step_rewards` and `anchor_obs` (gigpo,
            hgpo), `reward_baselines` (remax).
        config: the `algorithm` section of the config.

    Returns:
        `data` with the two columns, 0 at masked positions, and with what the estimator reports in
        `meta_info["advantage_metrics"]`. With `use_pf_ppo` and `gae`, a batch of the same size with rows drawn by
        score.

    Raises:
        ValueError: unknown estimator, a column it needs is missing, a reward or value is not finite (names the
            trajectory), or the estimator returned something else than it has to.
    """
    estimator = get_adv_estimator_fn(config.adv_estimator)
    inputs = gather_inputs(data, config)
    with torch.no_grad():
        advantages, returns = check_result(estimator(inputs), inputs)
    data.batch["advantages"] = advantages
    data.batch["returns"] = returns
    data.meta_info["advantage_metrics"] = inputs.metrics
    if config.use_pf_ppo and config.adv_estimator == AdvantageEstimator.GAE.value:
        return compute_pf_ppo_reweight_data(data, config.pf_ppo.reweight_method, config.pf_ppo.weight_pow)
    return data


def gather_inputs(data: DataProto, config: Any) -> AdvantageInputs:
    """The batch as estimators see it, checked: rewards, returns and values are finite and 0 where masked."""
    arrays = data.non_tensor_batch
    mask = compute_response_mask(data)
    valid = mask.bool()
    traj_index = arrays["traj_uid"]
    rewards = torch.where(valid, data.batch["token_level_rewards"], 0.0)
    check_finite(rewards.sum(dim=-1).cpu().numpy(), traj_index, "the reward (token_level_rewards)")
    real = valid.any(dim=-1)
    if "step_rewards" in data.batch.keys():
        step_rewards = torch.where(real, data.batch["step_rewards"], 0.0)
        check_finite(step_rewards.cpu().numpy(), traj_index, "the step return (step_rewards)")
    if "values" in data.batch.keys():
        values = torch.where(valid, data.batch["values"], 0.0).sum(dim=-1)
        check_finite(values.cpu().numpy(), traj_index, "the critic's value")
    step_index = arrays.get("step_index")
    return AdvantageInputs(
        token_level_rewards=rewards,
        response_mask=mask,
        index=arrays["uid"],
        traj_index=traj_index,
        step_index=None if step_index is None else np.asarray(step_index, dtype=np.int64),
        config=config,
        data=data,
    )


def check_result(result: Any, inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """What an estimator, which may be the user's own, returned: 0 at masked positions, and checked.

    Raises:
        ValueError: it is not two floating-point tensors of the rewards' shape, or not finite on valid tokens (names the
            trajectory).
    """
    where, shape = f"algorithm.adv_estimator={inputs.config.adv_estimator}", inputs.token_level_rewards.shape
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise ValueError(f"{where} returned {type(result).__name__}, not the pair (advantages, returns)")
    checked = []
    for name, tensor in zip(("advantages", "returns"), result, strict=True):
        if not isinstance(tensor, torch.Tensor) or tensor.shape != shape or not tensor.is_floating_point():
            found = repr(tensor)[:100]
            if isinstance(tensor, torch.Tensor):
                found = f"a {tensor.dtype} tensor {tuple(tensor.shape)}"
            raise ValueError(
                f"{where} returned {name} as {found}, not as a float tensor (rows, response_length) = "
                f"{tuple(shape)}; multiply a value per row with inputs.response_mask"
            )
        masked = torch.where(inputs.response_mask.bool(), tensor, 0.0)
        if not torch.isfinite(masked.sum()):
            check_finite(masked.sum(dim=-1).cpu().numpy(), inputs.traj_index, f"{where}: what it returned as {name}")
        checked.append(masked)
    return checked[0], checked[1]
