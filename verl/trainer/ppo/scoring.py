"""What the rows of a rollout are paid: scores, baselines taken apart from the rows, penalties."""

from __future__ import annotations

import logging

import numpy as np
import torch

from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.config.schema import PPOTrainerConfig
from verl.trainer.ppo.penalties import apply_invalid_action_penalty, apply_overlong_penalty
from verl.trainer.ppo.reward import RewardFunction, compute_reward

logger = logging.getLogger(__name__)


def score_rows(
    rows: DataProto, reward_fn: RewardFunction, config: PPOTrainerConfig, rm_wg: RayWorkerGroup | None = None
) -> tuple[DataProto, dict[str, float]]:
    """The rows that are learned from, with ``token_level_scores`` float32 ``(rows, response_length)``.

    Args:
        rows: of a rollout; those of ReMax's greedy episodes come out as ``reward_baselines`` of the others.
        reward_fn: rows to scores; a score of the reward model, where there is one, goes before it.
        config: of the run.
        rm_wg: ranks with a reward model.

    Returns:
        The rows and the metrics of penalties and baselines.
    """
    if rm_wg is not None:
        rows.batch["rm_scores"] = reward_model_scores(rows, rm_wg)
    scores, extra = compute_reward(rows, reward_fn)
    rows.batch["token_level_scores"] = scores.clone()
    rows.non_tensor_batch.update({key: np.array(value) for key, value in extra.items()})
    rows, metrics = take_baselines_apart(rows)
    actor, buffer = config.actor_rollout_ref.actor, config.reward_model.overlong_buffer
    if actor.use_invalid_action_penalty:
        coefficient, inadmissible = actor.invalid_action_penalty_coef, config.env.webshop.penalise_inadmissible
        rows, more = apply_invalid_action_penalty(rows, coefficient, inadmissible)
        metrics |= more
    if buffer.enable:
        rows, more = apply_overlong_penalty(rows, config.data.max_response_length, buffer.len, buffer.penalty_factor)
        metrics |= more
    return rows, metrics


def reward_model_scores(rows: DataProto, rm_wg: RayWorkerGroup) -> torch.Tensor:
    """``rm_scores`` of the rows, float32 ``(rows, response_length)``: the model's score on the last response token."""
    inputs = rows.select(
        batch_keys=["responses", "response_mask", "prompt_length"], non_tensor_batch_keys=["prompt_ids", "prompt_text"]
    )
    rows.non_tensor_batch.pop("prompt_text", None)
    padded, added = pad_dataproto_to_divisor(inputs, rm_wg.world_size)
    return unpad_dataproto(rm_wg.compute_rm_score(padded), added).batch["rm_scores"]


def take_baselines_apart(rows: DataProto) -> tuple[DataProto, dict[str, float]]:
    """The rows without those of greedy episodes, whose scores become ``reward_baselines`` of their tasks (ReMax).

    The baseline of a task is the score of its greedy episode: the mean over that episode's rows, which differ only
    where a reward function or a reward model judges each row by itself. It is what the episode was paid, before
    penalties. A task whose greedy episode did not come through is left out, with a warning.

    Returns:
        The rows, with ``reward_baselines`` float32 ``(rows,)`` where there are any, and ``remax/baseline_reward``, the
        mean over tasks.

    Raises:
        RuntimeError: no task has a baseline.
    """
    is_baseline = rows.non_tensor_batch.pop("is_baseline", np.zeros(len(rows), dtype=bool)).astype(bool)
    if not is_baseline.any():
        return rows, {}
    tasks, scores = rows.non_tensor_batch["uid"], rows.batch["token_level_scores"].sum(-1).numpy()
    baselines = {uid: float(scores[is_baseline & (tasks == uid)].mean()) for uid in set(tasks[is_baseline])}
    has_one = np.array([uid in baselines for uid in tasks])
    kept = np.flatnonzero(~is_baseline & has_one)
    lost = set(tasks[~has_one])
    if lost:
        logger.warning("%d tasks are left out, their greedy episode failed: %s", len(lost), ", ".join(sorted(lost)))
    if not len(kept):
        raise RuntimeError("no task has both a greedy episode and others: algorithm.adv_estimator=remax needs both")
    rows = rows.select_idxs(kept)
    rows.batch["reward_baselines"] = torch.tensor([baselines[uid] for uid in tasks[kept]], dtype=torch.float32)
    return rows, {"remax/baseline_reward": float(np.mean(list(baselines.values())))}
