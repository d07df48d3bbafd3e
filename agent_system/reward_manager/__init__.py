"""Rewards onto tokens."""

from agent_system.reward_manager.episode import EpisodeRewardManager

__all__ = ["EpisodeRewardManager"]
