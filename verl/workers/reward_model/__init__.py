"""The reward model: a trained network that judges responses."""

from verl.workers.reward_model.base import BasePPORewardModel
from verl.workers.reward_model.dp_reward_model import DataParallelRewardModel
from verl.workers.reward_model.worker import RewardModelWorker

__all__ = ["BasePPORewardModel", "DataParallelRewardModel", "RewardModelWorker"]
