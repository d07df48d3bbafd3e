"""Waiting for workers: every wait has a limit, and a failure names role, rank and method once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from verl.utils.lost_actors import constructor_failed, last_exception_in, loss_cause, plain_text

__all__ = ["WorkerError", "WorkerTimeoutError", "wait_for_workers"]

# After a first failure the others get this long to report theirs: a rank that was killed is noticed a little later
# than the broken connection it leaves on its peers, and is the cause to name.
_ROOT_CAUSE_SECONDS = 2.0


class WorkerError(RuntimeError):
    """A worker's method failed, or the worker died.

    Attributes:
        role: the worker's role or class.
        rank: its rank in the group.
        method: the method that was running (``"__init__"`` during start-up).
        cause_type: name of the original exception's type, e.g. ``"ValueError"``.
        cause_message: its text.
        remote_traceback: the traceback on the worker, as text (empty when the worker died).
        cause: the original exception where it could be sent over, else ``None``.
        others: ranks that failed in the same call.
    """

    def __init__(
        self,
        role: str,
        rank: int,
        method: str,
        cause_type: str,
        cause_message: str,
        remote_traceback: str = "",
        cause: BaseException | None = None,
        others: Sequence[int] = (),
    ) -> None:
        self.role, self.rank, self.method = role, rank, method
        self.cause_type, self.cause_message = cause_type, cause_message
        self.remote_traceback, self.cause, self.others = remote_traceback, cause, list(others)
        also = f" (ranks {list(others)} failed as well)" if others else ""
        text = f"{role} rank {rank} failed in {method}{also}: {cause_type}: {cause_message}"
        if remote_traceback:
            text += f"\n--- traceback on the worker ---\n{remote_traceback.rstrip()}"
        super().__init__(text)

    def __reduce__(self) -> tuple:
        text = (self.cause_type, self.cause_message, self.remote_traceback)
        return type(self), (self.role, self.rank, self.method, *text, self.cause, self.others)

    @property
    def worker_died(self) -> bool:
        """Whether the process is gone, as against a method that raised."""
        return self.cause_type.endswith(("ActorDiedError", "ActorUnavailableError", "RayActorError"))


class WorkerTimeoutError(TimeoutError):
    """Some workers did not answer in time.

    ``ranks`` and ``method`` say which and what was asked, ``key`` what to raise if they only need longer.
    """

    def __init__(self, role: str, ranks: list[int], method: str, seconds: float, key: str = "") -> None:
        self.role, self.ranks, self.method, self.seconds, self.key = role, ranks, method, seconds, key
        text = f"waited {seconds:g} s for {method} on {role} ranks {ranks}, which did not answer"
        super().__init__(text + (f"; if they need longer, raise {key}" if key else ""))

    def __reduce__(self) -> tuple:
        return type(self), (self.role, self.ranks, self.method, self.seconds, self.key)


def wait_for_workers(
    refs: Sequence[ray.ObjectRef],
    *,
    ranks: Sequence[int],
    role: str,
    method: str,
    timeout: float | None = None,
    key: str = "",
) -> list[Any]:
    """The answers behind ``refs``, in their order; ``key`` is the setting that holds ``timeout``.

    The first failure ends the wait, so a rank stuck in a collective with a failed peer does not hold it up.

    Raises:
        WorkerError: a worker raised or died.
        WorkerTimeoutError: ``timeout`` seconds passed.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    rank_of = dict(zip(refs, ranks, strict=True))
    answers: dict[ray.ObjectRef, Any] = {}
    failures: dict[int, RayError] = {}
    pending = list(dict.fromkeys(refs))
    while pending:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        done, pending = ray.wait(pending, num_returns=1, timeout=left)
        if not done and failures:
            break
        if not done:
            raise WorkerTimeoutError(role, sorted(rank_of[ref] for ref in pending), method, timeout, key)
        for ref in done:
            try:
                answers[ref] = ray.get(ref, timeout=left)
            except GetTimeoutError:
                raise WorkerTimeoutError(role, [rank_of[ref]], method, timeout, key) from None
            except RayError as error:
                if not failures:
                    deadline = time.monotonic() + _ROOT_CAUSE_SECONDS
                failures[rank_of[ref]] = error
    if failures:
        raise _describe(failures, role, method) from None
    return [answers[ref] for ref in refs]


def _describe(failures: dict[int, RayError], role: str, method: str) -> WorkerError:
    """One error out of all that were seen: a lost process if there is one, else the first."""
    gone = {rank: error for rank, error in failures.items() if isinstance(error, RayActorError)}
    lost = [rank for rank, error in gone.items() if not constructor_failed(error)]
    rank = lost[0] if lost else next(iter(failures))
    error, others = failures[rank], sorted(set(failures) - {rank})
    text = plain_text(error)
    if isinstance(error, RayTaskError):
        cause: BaseException | None = error.cause
        if isinstance(cause, WorkerError):
            return cause
        kind, message, trace = type(cause).__name__, str(cause), text
    elif constructor_failed(error):
        method, cause, trace = "__init__", None, text
        kind, message = last_exception_in(text)
    else:
        kind, message, trace, cause = type(error).__name__, f"its process is gone: {loss_cause()}\n{text}", "", error
    return WorkerError(role, rank, method, kind, message, remote_traceback=trace, cause=cause, others=others)
