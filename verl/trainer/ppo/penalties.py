"""What is taken off a row's reward before advantages: invalid actions, long responses, KL to the reference policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from verl.trainer.ppo.kl import KLController
from verl.trainer.ppo.kl import kl_penalty as kl_per_token

if TYPE_CHECKING:
    from verl.protocol import DataProto


def apply_invalid_action_penalty(
    data: DataProto, invalid_action_penalty_coef: float, penalise_inadmissible: bool = False
) -> tuple[DataProto, dict[str, float]]:
    """Take `invalid_action_penalty_coef` off the last response token of every row whose action was invalid.

    Only the offending step is hit: nothing reaches other steps of its trajectory. `step_rewards`, where present, is
    lowered alike.

    Args:
        data: rows with `token_level_scores` and `response_mask` (rows, response_length), `is_action_valid` (rows,)
            bool: the response had the asked-for form; and `is_action_admissible` (rows,) bool: the page offered the
            action.
        invalid_action_penalty_coef: in units of the episode reward.
        penalise_inadmissible: also hit well-formed actions that the current page did not offer
            (`env.webshop.penalise_inadmissible`).

    Returns:
        `data`, changed in place, and `episode/valid_action_ratio` (and `episode/admissible_action_ratio`), means over
        rows.
    """
    arrays = data.non_tensor_batch
    mask = data.batch["response_mask"].bool()
    real = mask.any(dim=-1)
    valid = arrays["is_action_valid"].astype(bool)
    metrics = {"episode/valid_action_ratio": mean_over(valid, real)}
    punished = ~valid
    if "is_action_admissible" in arrays:
        admissible = arrays["is_action_admissible"].astype(bool)
        metrics["episode/admissible_action_ratio"] = mean_over(admissible, real)
        if penalise_inadmissible:
            punished |= ~admissible

    hit = torch.from_numpy(punished).to(mask.device) & real
    take_off(data, invalid_action_penalty_coef * hit.float())
    return data, metrics


def apply_overlong_penalty(
    data: DataProto, max_response_length: int, buffer_length: int, penalty_factor: float
) -> tuple[DataProto, dict[str, float]]:
    """Soft over-long punishment (DAPO, arXiv 2503.14476, eq. 13), per row.

    A response of `n` tokens keeps its reward up to `max_response_length - buffer_length`; from there on
    `penalty_factor * (n - max_response_length + buffer_length) / buffer_length` is taken off, so that a response as
    long as the limit, which was cut, loses `penalty_factor`. `step_rewards`, where present, is lowered alike.

    Args:
        data: rows with `token_level_scores` and `response_mask` (rows, response_length).
        max_response_length: `data.max_response_length`, tokens.
        buffer_length, penalty_factor: `reward_model.overlong_buffer.{len,penalty_factor}`.

    Returns:
        `data`, changed in place, and over rows `response_length/overlong_share`, the share of rows that lost
        something, and `response_length/overlong_penalty`, the mean of what they lost.
    """
    lengths = data.batch["response_mask"].sum(dim=-1)
    excess = (lengths - (max_response_length - buffer_length)).float() / buffer_length
    penalty = penalty_factor * excess.clamp(min=0.0, max=1.0)  # (rows,)
    take_off(data, penalty)
    real = lengths > 0
    count = max(int(real.sum()), 1)
    return data, {
        "response_length/overlong_share": float((real & (excess > 0)).sum()) / count,
        "response_length/overlong_penalty": float(penalty[real].sum()) / count,
    }


def take_off(data: DataProto, penalty: torch.Tensor) -> None:
    """Lower the score at each row's last response token, and its `step_rewards`, by `penalty` (rows,); in place."""
    scores, mask = data.batch["token_level_scores"], data.batch["response_mask"].bool()
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, 0).amax(dim=-1, keepdim=True)  # (rows, 1)
    scores.scatter_add_(1, last, -penalty.to(scores.dtype).unsqueeze(-1))
    if "step_rewards" in data.batch.keys():
        data.batch["step_rewards"] -= penalty.to(data.batch["step_rewards"].dtype)


def mean_over(flags: np.ndarray, rows: torch.Tensor) -> float:
    """Share of true `flags` (rows,) among the chosen `rows` (rows,) bool; 0 without rows."""
    chosen = flags[rows.cpu().numpy()]
    return float(chosen.mean()) if chosen.size else 0.0


def apply_kl_penalty(
    data: DataProto, kl_ctrl: KLController, kl_penalty: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """token_level_rewards = token_level_scores - beta * KL per token, and one update of the controller of beta.

    Args:
        data: rows with `token_level_scores`, `old_log_probs`, `ref_log_prob` and `response_mask`, all
            (rows, response_length).
        kl_ctrl: holds beta; is told the mean over rows of each row's mean KL per token, and the number of rows.
        kl_penalty: a name that `verl.trainer.ppo.kl.kl_penalty` knows (`algorithm.kl_penalty`).

    Returns:
        `data` with the new column, `actor/reward_kl_penalty` (that mean) and `actor/reward_kl_penalty_coeff` (beta
        before the update).
    """
    mask = data.batch["response_mask"].bool()
    kl = torch.where(mask, kl_per_token(data.batch["old_log_probs"], data.batch["ref_log_prob"], kl_penalty), 0.0)
    beta = kl_ctrl.value
    data.batch["token_level_rewards"] = data.batch["token_level_scores"] - beta * kl
    lengths = mask.sum(dim=-1)
    real = lengths > 0
    rows = int(real.sum())
    current_kl = float((kl.sum(dim=-1)[real] / lengths[real]).mean()) if rows else 0.0
    kl_ctrl.update(current_kl=current_kl, n_steps=rows)
    return data, {"actor/reward_kl_penalty": current_kl, "actor/reward_kl_penalty_coeff": beta}
