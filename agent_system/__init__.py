"""Everything an agent does: environments, prompts, memory, the rollout loop and the episode reward.

Importing it makes ``WebAgentTextEnv-v0`` known to gym and gymnasium.
"""

from agent_system.environments.env_package.webshop import gym_faces as _gym_faces  # noqa: F401
