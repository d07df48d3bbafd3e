"""How far the engine's log-probabilities of what it sampled lie from the trainer's, and when they count instead."""

from __future__ import annotations

import torch

from verl.protocol import DataProto


def rollout_gap_metrics(rows: DataProto) -> dict[str, float]:
    """``training/rollout_probs_diff_{max,mean,std}``: |p_engine − p_trainer| over response tokens, and the mean
    absolute difference of their log-probabilities. Empty when the engine reported none. Rows of an earlier policy do
    not count."""
    if "rollout_log_probs" not in rows.batch.keys():
        return {}
    mask = rows.batch["response_mask"].bool() & ~_carried(rows)
    if not mask.any():
        return {}
    engine = rows.batch["rollout_log_probs"][mask]
    trainer = rows.batch["old_log_probs"][mask]
    gap = (engine.exp() - trainer.exp()).abs()
    return {
        "training/rollout_probs_diff_max": gap.max().item(),
        "training/rollout_probs_diff_mean": gap.mean().item(),
        "training/rollout_probs_diff_std": gap.std().item() if gap.numel() > 1 else 0.0,
        "training/rollout_log_probs_diff_mean": torch.abs(engine - trainer).mean().item(),
    }


def keep_behaviour_of_carried_rows(rows: DataProto) -> None:
    """Rows that an earlier policy sampled keep its log-probabilities as ``old_log_probs``; in place.

    The ratio of a policy loss is then taken against the policy that acted, so that these rows enter as off-policy data
    of one more update, clipped as such. Taking the present policy's would claim that it had acted.
    """
    carried = _carried(rows)
    if carried.any():
        old = rows.batch["old_log_probs"]
        rows.batch["old_log_probs"] = torch.where(carried, rows.batch["rollout_log_probs"].to(old.dtype), old)


def _carried(rows: DataProto) -> torch.Tensor:
    """``(rows, 1)`` bool: an earlier policy sampled the row (``policy_lag``)."""
    lag = rows.non_tensor_batch.get("policy_lag")
    none = torch.zeros(len(rows), 1, dtype=torch.bool)
    return none if lag is None else torch.from_numpy(lag.astype(int) > 0).unsqueeze(-1)
