"""Several roles in one process: an actor class that holds one inner worker for each role.

Roles given by name are imported by the rank: the driver starts its ranks before it imports what they run. Importing
takes most of a rank's start, so rank 0 publishes where the ranks meet before it, and the others ask for it after.
"""

from __future__ import annotations

import importlib
import inspect
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import ray

from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import MAGIC_ATTR
from verl.single_controller.ray.resource_pool import RayClassWithInitArgs
from verl.utils.long_lived import made_to_stay

__all__ = [
    "ROLE_METHOD_SEPARATOR",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
    "load_class",
]

# `_fuw_execute("<role>_fwmn_<method>", …)` runs a role's method, registered or not.
ROLE_METHOD_SEPARATOR = "_fwmn_"


def load_class(named: type | str) -> type:
    """The class behind a dotted name (``"package.module.Class"``); a class is returned as it is."""
    if isinstance(named, type):
        return named
    module, _, name = named.rpartition(".")
    return getattr(importlib.import_module(module), name)


@contextmanager
def _no_worker_placement() -> Iterator[None]:
    """Construct inner workers without placing them: the process has its place already."""
    before = os.environ.get("DISABLE_WORKER_INIT")
    os.environ["DISABLE_WORKER_INIT"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DISABLE_WORKER_INIT"]
        else:
            os.environ["DISABLE_WORKER_INIT"] = before


class _ColocatedWorker(Worker):
    """Base of the generated classes; ``role_classes`` and ``role_arguments`` are filled in by the generator."""

    role_classes: dict[str, type | str] = {}
    role_arguments: dict[str, tuple[tuple, dict]] = {}

    def _find_peers(self) -> None:
        """Nothing to do, where ``__new__`` has not left it to ``__init__``."""

    def _configure_before_init(self, center_name: str, rank: int) -> None:
        """Rank 0 publishes its address at once; the others ask for it in ``__init__``, whose errors Ray reports."""
        find_peers = partial(super()._configure_before_init, center_name, rank)
        if rank == 0:
            find_peers()
        else:
            self._find_peers = find_peers

    def __init__(self) -> None:
        super().__init__()
        begin = time.perf_counter()
        with made_to_stay():
            classes = {role: load_class(cls) for role, cls in self.role_classes.items()}
        self._import_seconds = time.perf_counter() - begin
        self._find_peers()
        self.worker_dict: dict[str, Any] = {}
        with _no_worker_placement():
            for role, cls in classes.items():
                args, kwargs = self.role_arguments[role]
                self.worker_dict[role] = cls(*args, **kwargs)
        self.fused_worker_dict = self.worker_dict
        for worker in self.worker_dict.values():
            setattr(worker, Worker.fused_worker_attr_name, self.worker_dict)
        self._started_at = time.time()

    def warm_up(self) -> dict[str, float]:
        """Every role's :meth:`~verl.single_controller.base.Worker.warm_up`.

        Returns:
            What the roles report, and of this process the seconds ``startup/processes``, from the moment its group
            asked for it until it was constructed (by the clocks of both machines), ``startup/imports`` of them for the
            classes of its roles.
        """
        seconds = {
            "startup/processes": self._started_at - float(os.environ.get("WG_ASKED_AT", self._started_at)),
            "startup/imports": self._import_seconds,
        }
        for worker in self.worker_dict.values():
            seconds.update(worker.warm_up())
        return seconds

    def __repr__(self) -> str:
        rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        return f"{'+'.join(self.role_classes)}[rank {rank}/{world_size}]"

    def _fuw_execute(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Run ``<role>_fwmn_<method>``."""
        role, separator, method = method_name.partition(ROLE_METHOD_SEPARATOR)
        assert separator and role in self.worker_dict, f"{method_name!r} is not <role>{ROLE_METHOD_SEPARATOR}<method>"
        return getattr(self.worker_dict[role], method)(*args, **kwargs)


def _forward_to_role(role: str, name: str, method: Any) -> Any:
    """The method ``<role>_<name>`` of a generated class; it keeps the rules that the method was registered with."""

    @wraps(method)
    def plain(self: _ColocatedWorker, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.worker_dict[role], name)(*args, **kwargs)

    @wraps(method)
    async def asynchronous(self: _ColocatedWorker, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self.worker_dict[role], name)(*args, **kwargs)

    forward = asynchronous if inspect.iscoroutinefunction(method) else plain
    setattr(forward, MAGIC_ATTR, getattr(method, MAGIC_ATTR))
    return forward


def create_colocated_worker_raw_cls(class_dict: dict[str, RayClassWithInitArgs], name: str | None = None) -> type:
    """The plain class that holds one inner worker for each role of ``class_dict``.

    A registered method of a role appears as ``<role>_<method>``, unless the role's class is given by name; any method
    runs through ``_fuw_execute``.
    """
    classes = {role: entry.worker_class for role, entry in class_dict.items()}
    members: dict[str, Any] = {
        "role_classes": classes,
        "role_arguments": {role: (entry.args, entry.kwargs) for role, entry in class_dict.items()},
    }
    for role, cls in classes.items():
        for method_name in () if isinstance(cls, str) else dir(cls):
            method = getattr(cls, method_name, None)
            if hasattr(method, MAGIC_ATTR):
                members[f"{role}_{method_name}"] = _forward_to_role(role, method_name, method)
    return type(name or f"FusedWorker_{'_'.join(classes)}", (_ColocatedWorker,), members)


def _remote(class_dict: dict[str, RayClassWithInitArgs], name: str | None) -> RayClassWithInitArgs:
    colocated = RayClassWithInitArgs(cls=ray.remote(create_colocated_worker_raw_cls(class_dict, name)))
    for entry in class_dict.values():
        colocated.update_options(entry.options)
    return colocated


def create_colocated_worker_cls(class_dict: dict[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """One actor class for all roles; ``RayWorkerGroup.spawn(roles)`` then gives one group for each role."""
    return _remote(class_dict, "WorkerDict")


def create_colocated_worker_cls_fused(class_dict: dict[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """Like :func:`create_colocated_worker_cls`, for ``RayWorkerGroup.fuse`` and ``spawn_fused``."""
    colocated = _remote(class_dict, None)
    colocated.fused_worker_used = True
    return colocated
