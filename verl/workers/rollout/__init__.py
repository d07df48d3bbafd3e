"""Rollout engines: the protocol, and its vLLM and transformers implementations."""

from verl.workers.rollout.base import RolloutEngine, RolloutRequest, RolloutResult, SamplingSettings

__all__ = ["RolloutEngine", "RolloutRequest", "RolloutResult", "SamplingSettings"]
