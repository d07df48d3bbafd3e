"""What the ranks of a run write into its log."""

from __future__ import annotations

import logging

_OURS = ("verl", "agent_system", "gigpo")
_FORMAT = "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"  # the driver's

OWN_LINE = rf"\[({'|'.join(_OURS)})[.\w]*\]\[[A-Z]+\] - "  # a regular expression that finds such a line


def log_as_rank(rank: int) -> None:
    """Let this process, a rank, write warnings of every logger, and rank 0 what our packages say from INFO on.

    Ray carries it to the driver's output. Without this a process shows warnings alone, and nothing of where they are
    from.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    logging.getLogger().handlers = [handler]
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # without a GPU it warns that Triton is missing
    for name in _OURS:
        logging.getLogger(name).setLevel(logging.INFO if rank == 0 else logging.WARNING)
