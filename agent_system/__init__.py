"""Everything an agent does: environments, prompts, memory, the rollout loop and the episode reward."""
