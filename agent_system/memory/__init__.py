"""What an agent remembers of its own episode."""

from agent_system.memory.base import BaseMemory
from agent_system.memory.memory import SearchMemory, SimpleMemory

__all__ = ["BaseMemory", "SearchMemory", "SimpleMemory"]
