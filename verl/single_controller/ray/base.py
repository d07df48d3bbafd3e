"""Worker groups on Ray: start the ranks, give each role a facade, and leave nothing behind.

::

    pool = RayResourcePool([2], use_gpu=False)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(MyWorker, config), env_vars={"OMP_NUM_THREADS": "1"})
    rows = group.compute(rows)              # a method that MyWorker registered
    group.shutdown()

Several roles in the same processes: ``create_colocated_worker_cls`` and :meth:`RayWorkerGroup.spawn`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from verl.single_controller.base import ResourcePool
from verl.single_controller.base.register_center.ray import register_center_name, wait_for_rank_zero_info
from verl.single_controller.ray.calls import DEFAULT_CALL_TIMEOUT, CallableWorkerGroup, func_generator
from verl.single_controller.ray.colocate import (
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    create_colocated_worker_raw_cls,
    load_class,
)
from verl.single_controller.ray.errors import WorkerError, WorkerTimeoutError
from verl.single_controller.ray.processes import end_actors
from verl.single_controller.ray.resource_pool import (
    RayClassWithInitArgs,
    RayResourcePool,
    extract_pg_from_exist,
    get_random_string,
    merge_resource_pool,
    sort_placement_group_by_node_ip,
)

__all__ = [
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "WorkerError",
    "WorkerTimeoutError",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
    "extract_pg_from_exist",
    "func_generator",
    "get_random_string",
    "merge_resource_pool",
    "sort_placement_group_by_node_ip",
]

logger = logging.getLogger(__name__)

# Seconds within which the death of an actor is certain to be seen by a probe.
_PROBE_SECONDS = 0.2

# Within these a process that runs and has nothing else to do answers.
_ANSWER_SECONDS = 5.0

_PLACE_VARIABLES = (
    "WORLD_SIZE",
    "RANK",
    "WG_PREFIX",
    "WG_BACKEND",
    "RAY_LOCAL_WORLD_SIZE",
    "RAY_LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "LOCAL_RANK",
)


class RayWorkerGroup(CallableWorkerGroup):
    """The ranks of one class (or of several colocated roles), called together.

    Args:
        resource_pool: where the ranks run; ``None`` to attach to running actors by ``worker_names`` or handles.
        ray_cls_with_init: what each rank is.
        bin_pack: ranks of a node share one placement (``STRICT_PACK``), else they may spread (``PACK``).
        name_prefix: start of the actors' names (random when empty).
        detached: the actors outlive the driver.
        worker_names: names of running actors, in rank order.
        worker_handles: their handles, when at hand.
        ray_wait_register_center_timeout: seconds within which all ranks must be constructed.
        device_name: ``"cuda"``, or another accelerator that Ray knows as a resource.
        env_vars: environment variables of every rank's process.
        call_timeout: seconds that a call may take (``None`` waits without limit); see also :meth:`time_limit`.
        call_timeout_key: the setting that holds ``call_timeout``; whoever waited in vain is told of it.
        role: the name that errors show; the class's name by default.
        wait: return when all ranks are constructed; otherwise at once, see :meth:`wait_until_started`.

    Raises:
        ValueError: the cluster can never hold the ranks.
        TimeoutError: resources or ranks were not ready in time.
        WorkerError: a rank's constructor failed.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: list[str] | None = None,
        worker_handles: list[ActorHandle] | None = None,
        ray_wait_register_center_timeout: float = 300,
        device_name: str = "cuda",
        env_vars: dict[str, str] | None = None,
        call_timeout: float | None = DEFAULT_CALL_TIMEOUT,
        role: str | None = None,
        wait: bool = True,
        call_timeout_key: str = "",
        **kwargs: Any,
    ) -> None:
        role = role or (ray_cls_with_init.worker_class.__name__ if ray_cls_with_init else "worker")
        super().__init__(resource_pool, role, call_timeout, call_timeout_key, **kwargs)
        self.ray_cls_with_init = ray_cls_with_init
        self.name_prefix = name_prefix or get_random_string(length=6)
        self.device_name = device_name
        self.fused_worker_used = ray_cls_with_init is not None and ray_cls_with_init.fused_worker_used
        self._ray_wait_register_center_timeout = ray_wait_register_center_timeout
        self._env_vars = _checked_env_vars(env_vars)
        self._probes: dict[ActorHandle, ray.ObjectRef] = {}
        self._is_shut_down = False
        self._owner: RayWorkerGroup = self
        self._starting: list[ray.ObjectRef] = []

        if resource_pool is None:
            self._init_with_detached_workers(worker_names, worker_handles)
        else:
            assert ray_cls_with_init is not None, "a group that starts workers needs ray_cls_with_init"
            self._init_with_resource_pool(resource_pool, ray_cls_with_init, bin_pack, detached)
            if wait:
                self.wait_until_started()
        self.method_names: list[str] = []
        if ray_cls_with_init is not None:
            self.method_names = self._bind_worker_method(ray_cls_with_init.worker_class, func_generator)

    # ---------------------------------------------------------------------------------------------------- start-up

    def _init_with_detached_workers(self, names: list[str] | None, handles: list[ActorHandle] | None) -> None:
        assert names or handles, "give the names or the handles of the running workers"
        self._workers = handles if handles is not None else [ray.get_actor(name=name) for name in names]
        self._worker_names = list(names or [])

    def _init_with_resource_pool(
        self, pool: RayResourcePool, ray_cls: RayClassWithInitArgs, bin_pack: bool, detached: bool
    ) -> None:
        self._start_deadline = time.monotonic() + self._ray_wait_register_center_timeout
        groups = pool.get_placement_groups(strategy="STRICT_PACK" if bin_pack else "PACK", device_name=self.device_name)
        pool.acquire()
        world_size, rank = pool.world_size, 0
        for group_index, local_world_size in enumerate(pool.store):
            assert local_world_size <= groups[group_index].bundle_count, "a placement group is smaller than its node"
            for local_rank in range(local_world_size):
                name = f"{self.name_prefix}{ray_cls.worker_class.__name__}_{group_index}:{local_rank}"
                options: dict[str, Any] = {
                    "name": name,
                    "runtime_env": {
                        "env_vars": self._rank_environment(rank, world_size, local_rank, local_world_size, pool)
                    },
                }
                if detached:
                    options["lifetime"] = "detached"
                worker = ray_cls(
                    placement_group=groups[group_index],
                    placement_group_bundle_idx=local_rank,
                    use_gpu=pool.use_gpu,
                    num_gpus=1 / pool.max_colocate_count,
                    device_name=self.device_name,
                    extra_options=options,
                )
                self._workers.append(worker)
                self._worker_names.append(name)
                rank += 1
        self._starting = [worker.__ray_ready__.remote() for worker in self._workers]

    def _rank_environment(
        self, rank: int, world_size: int, local_rank: int, local_world_size: int, pool: RayResourcePool
    ) -> dict[str, str]:
        # Ray shows every process its own accelerator alone, as number 0, unless it was told not to.
        own_device_only = pool.use_gpu and not os.environ.get("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES")
        return {
            **self._env_vars,
            "WORLD_SIZE": str(world_size),
            "RANK": str(rank),
            "WG_PREFIX": self.name_prefix,
            "WG_BACKEND": "ray",
            "WG_ASKED_AT": str(time.time()),
            "WG_SHARES_DEVICE": "1" if pool.use_gpu and pool.max_colocate_count > 1 else "0",
            "WG_REGISTER_CENTER_TIMEOUT": str(self._ray_wait_register_center_timeout),
            "RAY_LOCAL_WORLD_SIZE": str(local_world_size),
            "RAY_LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(local_world_size),
            "LOCAL_RANK": "0" if own_device_only else str(local_rank),
        }

    def wait_until_started(self) -> None:
        """Wait until all ranks are constructed; if one fails, or takes too long, the group is shut down.

        Calls may be sent before: they wait on the ranks. The time limit counts from when the ranks were asked for, and
        ranks that are ready by now are in time.

        Raises:
            TimeoutError: ranks were not constructed within ``ray_wait_register_center_timeout`` seconds.
            WorkerError: a rank's constructor failed.
        """
        owner = self._owner
        if not owner._starting:
            return
        try:
            key = "trainer.ray_wait_register_center_timeout"
            owner._wait(owner._starting, "__init__", timeout=owner._start_seconds_left(), key=key)
            center = register_center_name(owner.name_prefix)
            info = wait_for_rank_zero_info(center, timeout=owner._start_seconds_left())
        except (WorkerError, TimeoutError):
            owner.shutdown(grace_seconds=0)
            raise
        owner._starting = []
        owner._master_addr, owner._master_port = info["MASTER_ADDR"], info["MASTER_PORT"]

    def _start_seconds_left(self) -> float:
        return max(_ANSWER_SECONDS, self._start_deadline - time.monotonic())

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: list[str] | None = None,
        worker_handles: list[ActorHandle] | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        **kwargs: Any,
    ) -> RayWorkerGroup:
        """A group over actors that run already."""
        return cls(
            resource_pool=None,
            ray_cls_with_init=ray_cls_with_init,
            name_prefix=name_prefix,
            worker_names=worker_names,
            worker_handles=worker_handles,
            **kwargs,
        )

    # ------------------------------------------------------------------------------------------------------- roles

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, RayWorkerGroup]:
        """One facade for each colocated role: the same workers, with the role's methods under their own names."""
        return {role: self._facade(role) for role in prefix_set}

    def spawn_fused(self, prefix_set: Iterable[str]) -> dict[str, RayWorkerGroup]:
        """:meth:`spawn` for groups of ``create_colocated_worker_cls_fused``."""
        return self.spawn(prefix_set)

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make each role's facade an attribute of this group: ``group.actor.update(…)``."""
        for role, facade in self.spawn(prefix_set).items():
            setattr(self, role, facade)

    def _facade(self, role: str) -> RayWorkerGroup:
        role_classes = getattr(self.ray_cls_with_init.worker_class, "role_classes", {})
        if role not in role_classes:
            raise ValueError(f"there is no role {role!r} in this group; it has {sorted(role_classes)}")
        facade = type(self).from_detached(
            name_prefix=self.name_prefix,
            worker_names=self._worker_names,
            worker_handles=self._workers,
            device_name=self.device_name,
            call_timeout=self.call_timeout,
            call_timeout_key=self.call_timeout_key,
            role=role,
        )
        facade.sub_cls_name = role
        facade.ray_cls_with_init = self.ray_cls_with_init
        facade.fused_worker_used = self.fused_worker_used
        facade._owner = self._owner
        facade.method_names = facade._bind_worker_method(load_class(role_classes[role]), func_generator)
        return facade

    # -------------------------------------------------------------------------------------------- life and its end

    def _is_worker_alive(self, worker: ActorHandle) -> bool:
        """Whether the actor lives: a probe waits in its queue, and fails once the actor is dead."""
        probe = self._probes.pop(worker, None)
        if probe is None or ray.wait([probe], timeout=0)[0]:
            probe = worker.__ray_ready__.remote()
        done, _ = ray.wait([probe], timeout=_PROBE_SECONDS)
        if not done:
            self._probes[worker] = probe  # a busy worker answers later; one probe in its queue is enough
            return True
        try:
            ray.get(probe, timeout=1)
        except RayActorError:
            return False
        return True

    def shutdown(self, grace_seconds: float = 5.0) -> None:
        """End all workers and give their resources back; on return no process of theirs is left.

        Workers get ``grace_seconds`` to leave by themselves, then they are killed. A second call does nothing, and
        a facade ends the whole group, of which it is a part.
        """
        owner = self._owner
        if owner._is_shut_down:
            return
        owner._is_shut_down = True
        end_actors(owner._workers, owner.name_prefix, grace_seconds)
        if isinstance(owner._resource_pool, RayResourcePool):
            owner._resource_pool.release()

    @property
    def workers(self) -> list[ActorHandle]:
        """The actors in rank order."""
        return self._workers

    @property
    def worker_names(self) -> list[str]:
        """Their names."""
        return self._worker_names

    @property
    def master_address(self) -> str | None:
        """Where the ranks meet (``None`` for a group attached to running actors)."""
        return self._owner._master_addr

    @property
    def master_port(self) -> str | None:
        """The port there."""
        return self._owner._master_port

    @property
    def resource_pool(self) -> ResourcePool | None:
        """The pool the ranks run in (``None`` for a group attached to running actors)."""
        return self._resource_pool


def _checked_env_vars(env_vars: dict[str, str] | None) -> dict[str, str]:
    checked = {key: str(value) for key, value in (env_vars or {}).items()}
    if taken := sorted(set(checked) & set(_PLACE_VARIABLES)):
        raise ValueError(f"env_vars may not set {taken}: the group sets them for each rank")
    return checked
