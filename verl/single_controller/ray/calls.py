"""Calls to the ranks of a group: sent to one, some or all of them, and waited for with a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.actor import ActorHandle

from verl.single_controller.base import ResourcePool, WorkerGroup
from verl.single_controller.base.row_types import is_rows
from verl.single_controller.ray.colocate import ROLE_METHOD_SEPARATOR
from verl.single_controller.ray.errors import wait_for_workers

__all__ = ["DEFAULT_CALL_TIMEOUT", "CallableWorkerGroup", "func_generator"]

# Seconds that a call may take unless the group says otherwise: far beyond any phase of a step, it turns a run that
# hangs overnight into one that fails and says where.
DEFAULT_CALL_TIMEOUT = 6 * 3600.0


def func_generator(
    self: CallableWorkerGroup,
    method_name: str,
    dispatch_fn: Callable,
    collect_fn: Callable,
    execute_fn: Callable,
    blocking: bool,
) -> Callable[..., Any]:
    """The group's face of one registered method: dispatch, execute, wait if ``blocking``, collect, drop padding."""

    def call(*args: Any, **kwargs: Any) -> Any:
        from verl.protocol import _padding_size_key

        args, kwargs = dispatch_fn(self, *args, **kwargs)
        padding_size = kwargs.pop(_padding_size_key, 0)
        output = execute_fn(method_name, *args, **kwargs)
        if blocking:
            output = self._wait(output, method_name)
        output = collect_fn(self, output)
        if padding_size and is_rows(output) and len(output) > 0:
            output = output.slice(0, len(output) - padding_size)
        return output

    call.__name__ = call.__qualname__ = method_name
    return call


class CallableWorkerGroup(WorkerGroup):
    """Running actors that are called together, or some of them by rank.

    Args:
        resource_pool: where they run; ``None`` for actors that were running before.
        role: the name that errors show.
        call_timeout: seconds that a call may take (``None`` waits without limit); see also :meth:`time_limit`.

    Attributes:
        sub_cls_name: the colocated role whose methods are called; ``None`` for those of the actors themselves.
    """

    def __init__(
        self,
        resource_pool: ResourcePool | None,
        role: str,
        call_timeout: float | None,
        call_timeout_key: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(resource_pool=resource_pool, **kwargs)
        self.role = role
        self.call_timeout = call_timeout
        self.call_timeout_key = call_timeout_key
        self.sub_cls_name: str | None = None

    def _start_call(self, worker: ActorHandle, method_name: str, *args: Any, **kwargs: Any) -> ray.ObjectRef:
        """Send one call to one worker; on a facade the method is the role's."""
        if self.sub_cls_name is not None:
            forwarded = f"{self.sub_cls_name}_{method_name}"
            if hasattr(worker, forwarded):
                return getattr(worker, forwarded).remote(*args, **kwargs)
            call = getattr(worker, self.fused_worker_execute_fn_name)
            return call.remote(f"{self.sub_cls_name}{ROLE_METHOD_SEPARATOR}{method_name}", *args, **kwargs)
        return getattr(worker, method_name).remote(*args, **kwargs)

    def execute_ranks_async(self, ranks: Sequence[int], method: str, *args: Any, **kwargs: Any) -> list[ray.ObjectRef]:
        """Call ``method`` (registered or not) with the same arguments on some ranks; one reference for each."""
        if len(ranks) > 1:
            args = [_in_object_store(arg) for arg in args]
            kwargs = {key: _in_object_store(value) for key, value in kwargs.items()}
        return [self._start_call(self._workers[rank], method, *args, **kwargs) for rank in ranks]

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> ray.ObjectRef:
        """Call ``method_name`` on rank 0."""
        return self._start_call(self._workers[0], method_name, *args, **kwargs)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call ``method_name`` on rank 0 and wait for its answer."""
        return self._wait(self.execute_rank_zero_async(method_name, *args, **kwargs), method_name)

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> ray.ObjectRef:
        """Same as :meth:`execute_rank_zero_async`."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs)

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[ray.ObjectRef]:
        """Call ``method_name`` on all ranks.

        When every argument is a list with one element for each rank, rank ``i`` gets element ``i``; otherwise all
        ranks get all arguments.
        """
        world_size = len(self._workers)
        values = (*args, *kwargs.values())
        if values and all(isinstance(value, list) and len(value) == world_size for value in values):
            if all(element is value[0] for value in values for element in value):
                same = {key: value[0] for key, value in kwargs.items()}
                return self.execute_ranks_async(range(world_size), method_name, *(arg[0] for arg in args), **same)
            return [
                self._start_call(
                    worker, method_name, *(arg[rank] for arg in args), **{key: arg[rank] for key, arg in kwargs.items()}
                )
                for rank, worker in enumerate(self._workers)
            ]
        return self.execute_ranks_async(range(world_size), method_name, *args, **kwargs)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``method_name`` on all ranks and wait for their answers."""
        return self._wait(self.execute_all_async(method_name, *args, **kwargs), method_name)

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> list[ray.ObjectRef]:
        """Same as :meth:`execute_all_async`."""
        return self.execute_all_async(method_name, *args, **kwargs)

    def get(
        self,
        refs: ray.ObjectRef | Sequence[ray.ObjectRef],
        method: str = "call",
        timeout: float | None = None,
        key: str = "",
    ) -> Any:
        """The answers behind references of this group's calls; failures name role and rank like those of calls.

        ``key`` is the setting that holds ``timeout``: whoever waited in vain is told of it.
        """
        return self._wait(refs, method, timeout=timeout, key=key)

    @contextmanager
    def time_limit(self, seconds: float | None, key: str = "") -> Iterator[CallableWorkerGroup]:
        """Calls inside the block may take at most ``seconds``, which the setting ``key`` holds."""
        before = self.call_timeout, self.call_timeout_key
        self.call_timeout, self.call_timeout_key = seconds, key
        try:
            yield self
        finally:
            self.call_timeout, self.call_timeout_key = before

    def _wait(self, output: Any, method: str, timeout: float | None = None, key: str = "") -> Any:
        single = isinstance(output, ray.ObjectRef)
        refs = [output] if single else list(output)
        answers = wait_for_workers(
            refs,
            ranks=[self._rank_of(ref) for ref in refs],
            role=self.role,
            method=method,
            timeout=self.call_timeout if timeout is None else timeout,
            key=self.call_timeout_key if timeout is None else key,
        )
        return answers[0] if single else answers

    def _rank_of(self, ref: ray.ObjectRef) -> int:
        actor_id = ref.task_id().actor_id()
        ranks = [rank for rank, worker in enumerate(self._workers) if worker._actor_id == actor_id]
        assert ranks, "the reference is not of a call to this group"
        return ranks[0]


def _in_object_store(value: Any) -> Any:
    """Rows that several workers get are stored once; everything else goes along with the call."""
    return ray.put(value) if is_rows(value) else value
