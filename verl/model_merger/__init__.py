"""From a sharded checkpoint to a Hugging Face folder; see ``verl.model_merger.__main__`` for the command."""

from verl.model_merger.compare import Difference, compare
from verl.model_merger.merge import MergeOptions, merge, test

__all__ = ["Difference", "MergeOptions", "compare", "merge", "test"]
