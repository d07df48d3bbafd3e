"""Groups of workers and the resources they run on, independent of Ray."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from verl.single_controller.base.decorator import (
    MAGIC_ATTR,
    Dispatch,
    Execute,
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
)

__all__ = ["ClassWithInitArgs", "ResourcePool", "WorkerGroup", "check_workers_alive"]

logger = logging.getLogger(__name__)


class ResourcePool:
    """How many processes run on each node.

    Args:
        process_on_nodes: processes per node, one number for each node.
        max_colocate_count: how many worker groups may share one process slot.
        n_gpus_per_node: accelerators of a node.
    """

    def __init__(
        self, process_on_nodes: list[int] | None = None, max_colocate_count: int = 10, n_gpus_per_node: int = 8
    ) -> None:
        self._store: list[int] = list(process_on_nodes or [])
        self.max_colocate_count = max_colocate_count
        self.n_gpus_per_node = n_gpus_per_node

    def add_node(self, process_count: int) -> None:
        """Add a node with ``process_count`` processes."""
        self._store.append(process_count)

    @property
    def world_size(self) -> int:
        """All processes together."""
        return sum(self._store)

    def __call__(self) -> list[int]:
        return self._store

    @property
    def store(self) -> list[int]:
        """Processes per node."""
        return self._store

    def local_world_size_list(self) -> list[int]:
        """For every rank, the number of processes on its node."""
        return [count for count in self._store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """For every rank, its number on its node."""
        return [local_rank for count in self._store for local_rank in range(count)]


class ClassWithInitArgs:
    """A class and the arguments to construct it with, somewhere else and later."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs
        self.fused_worker_used = False

    def __call__(self) -> Any:
        return self.cls(*self.args, **self.kwargs)


def check_workers_alive(workers: list, is_alive: Callable[[Any], bool], gap_time: float = 1) -> None:
    """Look every ``gap_time`` seconds whether all workers live; abort this process (SIGABRT) once one does not."""
    while True:
        for rank, worker in enumerate(workers):
            if not is_alive(worker):
                logger.critical("worker of rank %d (%s) died; this process is aborted", rank, worker)
                signal.raise_signal(signal.SIGABRT)
        time.sleep(gap_time)


class WorkerGroup:
    """Workers that are called together. A subclass starts them and sends them calls."""

    fused_worker_execute_fn_name = "_fuw_execute"

    def __init__(self, resource_pool: ResourcePool | None, **kwargs: Any) -> None:
        self._is_init_with_detached_workers = resource_pool is None
        self.fused_worker_used = False
        self._resource_pool: ResourcePool | None = resource_pool
        self._workers: list[Any] = []
        self._worker_names: list[str] = []
        self._master_addr: str | None = None
        self._master_port: str | None = None
        self._checker_thread: threading.Thread | None = None

    def _is_worker_alive(self, worker: Any) -> bool:
        raise NotImplementedError("a WorkerGroup subclass says how to see whether a worker lives")

    def _block_until_all_workers_alive(self, timeout: float = 300.0) -> None:
        deadline = time.monotonic() + timeout
        while dead := [rank for rank, worker in enumerate(self._workers) if not self._is_worker_alive(worker)]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout:g} s for the workers of ranks {dead} to come alive")
            time.sleep(0.1)

    def start_worker_aliveness_check(self, every_n_seconds: float = 1) -> None:
        """Watch the workers from a background thread and abort this process once one died."""
        self._block_until_all_workers_alive()
        self._checker_thread = threading.Thread(
            target=check_workers_alive, args=(self._workers, self._is_worker_alive, every_n_seconds), daemon=True
        )
        self._checker_thread.start()

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return len(self._workers)

    def _bind_worker_method(self, user_defined_cls: type, func_generator: Callable[..., Callable]) -> list[str]:
        """Give this group one method for every registered method of the workers' class; returns their names."""
        bound = []
        for name in dir(user_defined_cls):
            rules = getattr(getattr(user_defined_cls, name, None), MAGIC_ATTR, None)
            if rules is None:
                continue
            if hasattr(type(self), name):
                raise ValueError(
                    f"{user_defined_cls.__name__}.{name} is registered but {type(self).__name__} has a member of that "
                    "name; rename the worker's method"
                )
            mode = rules["dispatch_mode"]
            functions = get_predefined_dispatch_fn(mode) if isinstance(mode, Dispatch) else mode
            if mode is Dispatch.ONE_TO_ALL and rules["execute_mode"] is Execute.RANK_ZERO:
                functions = get_predefined_dispatch_fn(Dispatch.RANK_ZERO)  # there is one worker to give arguments to
            execute_fn_name = get_predefined_execute_fn(rules["execute_mode"])["execute_fn_name"]
            call = func_generator(
                self,
                name,
                dispatch_fn=functions["dispatch_fn"],
                collect_fn=functions["collect_fn"],
                execute_fn=getattr(self, execute_fn_name),
                blocking=rules["blocking"],
            )
            setattr(self, name, call)
            bound.append(name)
        return bound
