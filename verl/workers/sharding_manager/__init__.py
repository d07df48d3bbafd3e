"""The hybrid engine: weights and memory between the trainer and the rollout engine of one process."""

from verl.workers.sharding_manager.hybrid_engine import HybridEngine

__all__ = ["HybridEngine"]
