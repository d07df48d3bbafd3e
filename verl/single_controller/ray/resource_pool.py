"""Where workers run: pools of Ray placement groups, and the class that starts one actor in one of them."""

from __future__ import annotations

import secrets
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from verl.single_controller.base import ClassWithInitArgs, ResourcePool

__all__ = [
    "RayClassWithInitArgs",
    "RayResourcePool",
    "extract_pg_from_exist",
    "get_random_string",
    "merge_resource_pool",
    "sort_placement_group_by_node_ip",
]

# What a worker without an accelerator asks Ray for. It is a ticket, not a measure of its load: ranks of a CPU run are
# meant to share a small machine, whose cores the operating system divides.
CPU_WORKER_SHARE = 0.01


def get_random_string(length: int) -> str:
    """Random lower-case letters and digits that depend on no seed."""
    return secrets.token_hex((length + 1) // 2)[:length]


def _bundle_nodes(group: PlacementGroup) -> dict[int, str]:
    return placement_group_table(group)["bundles_to_node_id"]


def sort_placement_group_by_node_ip(pgs: list[PlacementGroup]) -> list[PlacementGroup]:
    """Placement groups (each on one node) in the order of their nodes' addresses.

    Ranks then fall on the same machines after a restart, so that a file saved by one rank is found by it again.
    """
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return sorted(pgs, key=lambda group: addresses[_bundle_nodes(group)[0]])


class RayResourcePool(ResourcePool):
    """Processes on nodes, as one Ray placement group for each node.

    Args:
        process_on_nodes: processes per node, e.g. ``[8, 8]``.
        use_gpu: every process gets an accelerator; otherwise only a token share of a CPU, so that any number of
            processes fits a small machine.
        name_prefix: start of the placement groups' names (random when empty).
        max_colocate_count: how many worker groups may share a process slot; each of their workers takes
            ``1 / max_colocate_count`` of its accelerator.
        detached: the pool outlives the driver.
        accelerator_type: a Ray accelerator type that the nodes must have.
        start_timeout: seconds to wait for the resources.
    """

    def __init__(
        self,
        process_on_nodes: list[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
        start_timeout: float = 300.0,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        self.use_gpu = use_gpu
        self.name_prefix = name_prefix or get_random_string(length=6)
        self.pgs: list[PlacementGroup] | None = None
        self.detached = detached
        self.accelerator_type = accelerator_type
        self.start_timeout = start_timeout
        self._users = 0
        self._parts: list[RayResourcePool] = []  # the pools that a merged pool borrows from

    def bundle(self, device_name: str = "cuda") -> dict[str, float]:
        """What one process slot asks Ray for."""
        if not self.use_gpu:
            return {"CPU": CPU_WORKER_SHARE * self.max_colocate_count}
        bundle = {"CPU": float(self.max_colocate_count), _resource_name(device_name): 1.0}
        if self.accelerator_type is not None:
            bundle[self.accelerator_type] = 1e-4
        return bundle

    def get_placement_groups(
        self, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str = "cuda"
    ) -> list[PlacementGroup]:
        """The pool's placement groups, one a node, made at the first call.

        Raises:
            ValueError: the cluster can never have these resources.
            TimeoutError: they did not become free within ``start_timeout`` seconds.
        """
        if self.pgs is not None:
            return self.pgs
        bundle = self.bundle(device_name)
        self._check_capacity(bundle)
        prefix = name or f"{self.name_prefix}verl_group_{'_'.join(str(count) for count in self.store)}:"
        groups = [
            placement_group(
                [dict(bundle) for _ in range(count)],
                strategy=strategy,
                name=f"{prefix}{index}",
                lifetime="detached" if self.detached else None,
            )
            for index, count in enumerate(self.store)
        ]
        try:
            ray.get([group.ready() for group in groups], timeout=self.start_timeout)
        except GetTimeoutError:
            for group in groups:
                remove_placement_group(group)
            raise TimeoutError(
                f"waited {self.start_timeout:g} s for {self.store} process slots, each {bundle} ; free in the cluster: "
                f"{_readable(ray.available_resources())}. Stop what else runs on it, or lower "
                "trainer.n_gpus_per_node / trainer.nnodes"
            ) from None
        self.pgs = sort_placement_group_by_node_ip(groups)
        return self.pgs

    def _check_capacity(self, bundle: dict[str, float]) -> None:
        total = ray.cluster_resources()
        for resource, amount in bundle.items():
            needed = amount * self.world_size
            if needed > total.get(resource, 0.0) + 1e-9:
                raise ValueError(
                    f"{self.world_size} processes need {needed:g} {resource} but the Ray cluster has "
                    f"{total.get(resource, 0.0):g}; lower trainer.n_gpus_per_node / trainer.nnodes, raise "
                    "ray_init.num_cpus, or set trainer.device=cpu on a machine without GPUs"
                )

    def acquire(self) -> None:
        """Count one more worker group that lives in this pool."""
        self._users += 1
        for part in self._parts:
            part.acquire()

    def release(self) -> None:
        """Count one less; the last one gives the resources back."""
        self._users = max(0, self._users - 1)
        for part in self._parts:
            part.release()
        if self._users == 0 and not self._parts:
            self.shutdown()

    def shutdown(self) -> None:
        """Give the resources back; actors that still run in the pool are killed."""
        for group in self.pgs or []:
            remove_placement_group(group)
        self.pgs = None


def _resource_name(device_name: str) -> str:
    return "GPU" if device_name in ("cuda", "gpu") else device_name.upper()


def _readable(resources: dict[str, float]) -> dict[str, float]:
    return {name: round(amount, 2) for name, amount in sorted(resources.items()) if ":" not in name}


def extract_pg_from_exist(
    resource_pools: dict[str, RayResourcePool], src_role_names: list[str], resource_pool: RayResourcePool
) -> list[PlacementGroup]:
    """Placement groups of the named pools that can hold ``resource_pool``'s processes, the largest first.

    ``ValueError`` when they are too few or too small.
    """
    source = [
        group
        for role, pool in resource_pools.items()
        for group in pool.get_placement_groups()
        if role in src_role_names
    ]
    by_size = sorted(source, key=lambda group: group.bundle_count, reverse=True)
    wanted = sorted(enumerate(resource_pool.store), key=lambda item: item[1], reverse=True)
    if len(by_size) < len(wanted) or any(g.bundle_count < n for g, (_, n) in zip(by_size, wanted, strict=False)):
        sizes = [group.bundle_count for group in by_size]
        raise ValueError(f"slots {resource_pool.store} do not fit the placement groups of {src_role_names}: {sizes}")
    chosen = {node: group for (node, _), group in zip(wanted, by_size, strict=False)}
    return [chosen[node] for node in range(len(wanted))]


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> RayResourcePool:
    """One pool over the process slots of both, which must be of the same kind."""
    assert rp1.use_gpu == rp2.use_gpu, "both pools must use accelerators, or neither"
    assert rp1.max_colocate_count == rp2.max_colocate_count, "max_colocate_count differs between the pools"
    assert rp1.n_gpus_per_node == rp2.n_gpus_per_node, "n_gpus_per_node differs between the pools"
    assert rp1.detached == rp2.detached, "both pools must be detached, or neither"
    merged = RayResourcePool(
        rp1.store + rp2.store,
        rp1.use_gpu,
        f"{rp1.name_prefix}_{rp2.name_prefix}",
        rp1.max_colocate_count,
        rp1.detached,
        rp1.accelerator_type,
        rp1.start_timeout,
    )
    merged._parts = [rp1, rp2]
    merged.pgs = rp1.get_placement_groups() + rp2.get_placement_groups()
    return merged


class RayClassWithInitArgs(ClassWithInitArgs):
    """A Ray actor class (or a plain class to be made one) with its constructor's arguments.

    A role of a colocated group may be given by its dotted name, ``"package.module.Class"``: the ranks import it after
    they have started, and the driver when it makes the role's facade.
    """

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(ray.remote(cls) if isinstance(cls, type) else cls, *args, **kwargs)
        self._options: dict[str, Any] = {}
        self._additional_resource: dict[str, float] = {}

    @property
    def worker_class(self) -> type | str:
        """The plain class behind the actor class, or the name that was given instead."""
        return self.cls if isinstance(self.cls, str) else self.cls.__ray_actor_class__

    @property
    def options(self) -> dict[str, Any]:
        """Ray actor options given so far."""
        return dict(self._options)

    def set_additional_resource(self, additional_resource: dict[str, float]) -> None:
        """Further Ray resources that every actor asks for."""
        self._additional_resource = additional_resource

    def update_options(self, options: dict[str, Any]) -> None:
        """Ray actor options (``name``, ``lifetime``, ``runtime_env``, …); ``env_vars`` add up."""
        merged = {**self._options, **options}
        if "runtime_env" in self._options and "runtime_env" in options:
            old, new = self._options["runtime_env"], options["runtime_env"]
            env_vars = {**old.get("env_vars", {}), **new.get("env_vars", {})}
            merged["runtime_env"] = {**old, **new, "env_vars": env_vars}
        self._options = merged

    def __call__(
        self,
        placement_group: PlacementGroup,
        placement_group_bundle_idx: int,
        use_gpu: bool = True,
        num_gpus: float = 1,
        sharing_with: ActorHandle | None = None,
        device_name: str = "cuda",
        extra_options: dict[str, Any] | None = None,
    ) -> ActorHandle:
        """Start the actor in one bundle, or on the node and accelerators of ``sharing_with``.

        ``extra_options`` are this actor's own options, e.g. its name and rank.
        """
        ticket = RayClassWithInitArgs(self.cls)
        ticket.update_options(self._options)
        ticket.update_options(extra_options or {})
        options = ticket._options
        if sharing_with is not None:
            node_id = ray.get(sharing_with.get_node_id.remote(), timeout=60)
            devices = ray.get(sharing_with.get_cuda_visible_devices.remote(), timeout=60)
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
            return self.cls.options(**options).remote(*self.args, cuda_visible_devices=devices, **self.kwargs)

        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=placement_group, placement_group_bundle_index=placement_group_bundle_idx
        )
        options.setdefault("num_cpus", 1 if use_gpu else CPU_WORKER_SHARE)
        resources = dict(self._additional_resource)
        if use_gpu and _resource_name(device_name) == "GPU":
            options["num_gpus"] = num_gpus
        elif use_gpu:
            resources[_resource_name(device_name)] = num_gpus
        if resources:
            options["resources"] = resources
        return self.cls.options(**options).remote(*self.args, **self.kwargs)
