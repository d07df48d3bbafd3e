"""Rolling out: from a batch shell to rows of (prompt, response) pairs."""

from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from agent_system.multi_turn_rollout.rows import episodes_to_records
from agent_system.multi_turn_rollout.utils import adjust_batch, filter_group_data

__all__ = ["TrajectoryCollector", "adjust_batch", "episodes_to_records", "filter_group_data"]
