"""What the ranks of a run write into its log."""

from __future__ import annotations

import logging

_OURS = ("verl", "agent_system", "gigpo")
_FORMAT = "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"  # the driver's


def log_as_rank(rank: int) -> None:
    """Let this process, a rank, write what our packages log: rank 0 from INFO on, the others from WARNING on.

    Ray carries it to the driver's output. Without this a process shows warnings alone, and nothing of where they are
    from.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    for name in _OURS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
