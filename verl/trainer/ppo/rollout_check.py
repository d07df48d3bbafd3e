"""How far the engine's log-probabilities of what it sampled lie from the trainer's."""
from __future__ import annotations

import torch

from verl.protocol import DataProto


def rollout_gap_metrics(rows: DataProto) -> dict[str, float]:
    """``training/rollout_probs_diff_{max,mean,std}``: |p_engine − p_trainer| over response tokens, and the mean
    absolute difference of their log-probabilities. Empty when the engine reported none."""
    if "rollout_log_probs" not in rows.batch.keys():
        return {}
    mask = rows.batch["response_mask"].bool()
    engine = rows.batch["rollout_log_probs"][mask]
    trainer = rows.batch["old_log_probs"][mask]
    gap = (engine.exp() - trainer.exp()).abs()
    return {
        "training/rollout_probs_diff_max": gap.max().item(),
        "training/rollout_probs_diff_mean": gap.mean().item(),
        "training/rollout_probs_diff_std": gap.std().item() if gap.numel() > 1 else 0.0,
        "training/rollout_log_probs_diff_mean": torch.abs(engine - trainer).mean().item(),
    }
