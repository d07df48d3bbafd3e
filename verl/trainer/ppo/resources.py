"""Which worker plays which role on which ranks.

Nothing here imports torch: the ranks are asked for first, and start while the driver imports the rest.
"""
from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import ray

from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls
from verl.trainer.config.schema import PPOTrainerConfig


class Role(Enum):
    """What a group of workers is there for; the values are those of the reference."""

    Actor = 0
    Rollout = 1
    ActorRollout = 2
    Critic = 3
    RefPolicy = 4
    RewardModel = 5
    ActorRolloutRef = 6


@dataclass
class ResourcePoolManager:
    """Pools of ranks and the roles that live on them.

    Attributes:
        resource_pool_spec: pool name → ranks on each node, e.g. ``{"global_pool": [2]}``.
        mapping: role → pool name.
        use_gpu: whether a rank owns a GPU.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Role, str]
    use_gpu: bool = True
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)

    def create_resource_pool(self) -> None:
        """Make the pools; every role of a pool shares its processes, hence ``max_colocate_count=1``."""
        for name, process_on_nodes in self.resource_pool_spec.items():
            self.resource_pool_dict[name] = RayResourcePool(
                process_on_nodes=process_on_nodes, use_gpu=self.use_gpu, max_colocate_count=1, name_prefix=name
            )

    def get_resource_pool(self, role: Role) -> RayResourcePool:
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Ranks over all pools (GPUs, or CPU ranks where there are none)."""
        return sum(n for nodes in self.resource_pool_spec.values() for n in nodes)


@dataclass(frozen=True)
class WorkerGroups:
    """The facades through which the driver talks to its ranks."""

    actor_rollout: RayWorkerGroup
    critic: RayWorkerGroup | None
    reward_model: RayWorkerGroup | None
    root: RayWorkerGroup


def worker_env_vars(config: PPOTrainerConfig) -> dict[str, str]:
    """Environment of every rank: read before torch, vLLM or OpenMP are imported there."""
    env = {
        "TOKENIZERS_PARALLELISM": "true",
        "NCCL_DEBUG": "WARN",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TQDM_DISABLE": "1",  # a bar is a line of the log for each of its moves; the driver says what it waits for
    }
    if config.trainer.device == "cpu":
        env |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
    elif config.trainer.compile_cache_dir is not None:
        folder = Path(config.trainer.compile_cache_dir).expanduser().absolute()
        caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "VLLM_CACHE_ROOT": "vllm"}
        env |= {name: str(folder / part) for name, part in caches.items() if name not in os.environ}
    return env


@dataclass(frozen=True)
class StartingRanks:
    """Ranks that were asked for and start by themselves, as far as they can without the driver.

    Attributes:
        root: their group; a rank is called in it once it is constructed.
        roles: the names of their roles.
        warming_up: what each rank does then, see ``Worker.warm_up``.
    """

    root: RayWorkerGroup
    roles: tuple[str, ...]
    warming_up: list[ray.ObjectRef]

    def groups(self) -> WorkerGroups:
        """A facade for each role, which imports the role's class here; calls to them wait on the ranks."""
        spawned = self.root.spawn(prefix_set=self.roles)
        return WorkerGroups(
            actor_rollout=spawned["actor_rollout"],
            critic=spawned.get("critic"),
            reward_model=spawned.get("rm"),
            root=self.root,
        )

    def wait(self, timeout: float | None = None) -> list[dict[str, float]]:
        """Wait until all are constructed and warm; each rank's seconds of ``startup/*``.

        Raises:
            TimeoutError: a rank was not constructed within ``trainer.ray_wait_register_center_timeout``, or not warm
                ``timeout`` seconds later.
            WorkerError: it failed.
        """
        self.root.wait_until_started()
        return self.root.get(self.warming_up, method="warm_up", timeout=timeout, key="trainer.start_timeout")


def start_ranks(
    config: PPOTrainerConfig,
    role_worker_mapping: dict[Role, Any],
    pools: ResourcePoolManager,
    use_critic: bool,
) -> StartingRanks:
    """Ask for one process per rank that holds every role, without waiting for it.

    Args:
        config: the validated configuration.
        role_worker_mapping: worker class of each role: a class, a Ray actor class, or a dotted name, which is imported
            where it is needed.
        pools: the ranks.
        use_critic: whether they play the critic's role.

    Raises:
        ValueError: the Ray cluster can never hold them.
        TimeoutError: it has no room for them.
    """
    device = config.trainer.device
    classes = {
        "actor_rollout": RayClassWithInitArgs(
            cls=role_worker_mapping[Role.ActorRollout],
            config=config.actor_rollout_ref,
            role="actor_rollout_ref" if config.uses_reference else "actor_rollout",
            device=device,
            requests=config.requests_at_once,
        )
    }
    if use_critic:
        classes["critic"] = RayClassWithInitArgs(
            cls=role_worker_mapping[Role.Critic],
            config=config.critic,
            device=device,
            response_length=config.data.max_response_length,
        )
    if config.reward_model.enable:
        classes["rm"] = RayClassWithInitArgs(
            cls=role_worker_mapping[Role.RewardModel], config=config.reward_model, device=device
        )
    pools.create_resource_pool()
    root = RayWorkerGroup(
        resource_pool=pools.get_resource_pool(Role.ActorRollout),
        ray_cls_with_init=create_colocated_worker_cls(class_dict=classes),
        env_vars=worker_env_vars(config),
        ray_wait_register_center_timeout=config.trainer.ray_wait_register_center_timeout,
        call_timeout=config.trainer.step_timeout,
        call_timeout_key="trainer.step_timeout",
        wait=False,
    )
    return StartingRanks(root, tuple(classes), root.execute_all_async("warm_up"))
