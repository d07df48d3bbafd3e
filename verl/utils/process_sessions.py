"""Helper processes that a signal to the group of this one does not reach.

GNU ``timeout``, launchers, a shell that ends and Ctrl-C send their signal to a whole process group. Ray's processes and
the loader's would end at once then, while the driver, which is to answer it, still needs them to save a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["children_in_own_sessions"]

_open_blocks = 0


def _leave_session() -> None:
    if _open_blocks:
        os.setsid()  # a new group as well; a child just forked leads no group, so this cannot be refused


# ``multiprocessing`` calls this in its forked children; ``subprocess`` where it is given a ``preexec_fn``, as by Ray.
os.register_at_fork(after_in_child=_leave_session)


@contextmanager
def children_in_own_sessions() -> Iterator[None]:
    """What this process forks inside the block, and what that starts later, is outside its process group and session.

    A process that is to be ended with this one has to see to that itself: Ray's have the kernel's parent-death signal,
    torch's loader processes look for their parent.
    """
    global _open_blocks
    _open_blocks += 1
    try:
        yield
    finally:
        _open_blocks -= 1
