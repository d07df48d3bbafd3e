"""The worker: one process, one rank.

A worker learns its place from environment variables that its group sets before the process starts: ``RANK``,
``WORLD_SIZE``, ``RAY_LOCAL_RANK``, ``RAY_LOCAL_WORLD_SIZE`` and ``WG_PREFIX``. Where the ranks meet
(``MASTER_ADDR``, ``MASTER_PORT``) is chosen by rank 0 and published in the group's register center; the other ranks
read it there. All this happens in ``__new__``, i.e. before the ``__init__`` of a derived class runs, so that class may
initialise ``torch.distributed`` at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from verl.single_controller.base.decorator import Dispatch, Execute, register
from verl.single_controller.base.register_center.ray import (
    create_worker_group_register_center,
    register_center_name,
    wait_for_rank_zero_info,
)
from verl.utils.net_utils import get_free_port
from verl.utils.rank_log import log_as_rank

__all__ = ["DistGlobalInfo", "DistRankInfo", "Worker", "WorkerHelper"]

# Seconds that a rank waits for rank 0 to publish its address, unless the group says otherwise.
DEFAULT_REGISTER_CENTER_TIMEOUT = 300.0


@dataclass
class DistRankInfo:
    """A rank's place in a grid of parallel dimensions."""

    tp_rank: int
    dp_rank: int
    pp_rank: int
    cp_rank: int = 0


@dataclass
class DistGlobalInfo:
    """The sizes of that grid."""

    tp_size: int
    dp_size: int
    pp_size: int
    cp_size: int = 1


class WorkerHelper:
    """Facts about the node that a worker runs on."""

    @staticmethod
    def _get_node_ip() -> str:
        return ray.util.get_node_ip_address().strip("[]")

    @staticmethod
    def _get_free_port() -> int:
        return get_free_port()

    def get_available_master_addr_port(self) -> tuple[str, str]:
        """This node's address and a free port on it, both as strings."""
        return self._get_node_ip(), str(self._get_free_port())

    # The name under which earlier code knows the method.
    get_availale_master_addr_port = get_available_master_addr_port


class Worker(WorkerHelper):
    """Base of everything that runs as one rank of a worker group."""

    fused_worker_attr_name = "fused_worker_dict"

    _rank: int
    _world_size: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Worker:
        """Place the worker in its group, except where none is meant (see ``DISABLE_WORKER_INIT``)."""
        instance = super().__new__(cls)
        if os.environ.get("DISABLE_WORKER_INIT", "0") == "1":
            return instance
        rank, prefix = os.environ.get("RANK"), os.environ.get("WG_PREFIX")
        if rank is not None and prefix is not None:
            log_as_rank(int(rank))
            instance._configure_before_init(register_center_name(prefix), int(rank))
        return instance

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        self._world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._rank = int(os.environ.get("RANK", "0"))
        self.fused_worker_dict: dict[str, Worker] = {}
        if cuda_visible_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = cuda_visible_devices

    def _configure_before_init(self, center_name: str, rank: int) -> None:
        """Agree on ``MASTER_ADDR`` and ``MASTER_PORT`` with the other ranks of the group."""
        if rank == 0:
            address, port = self.get_available_master_addr_port()
            info = {"MASTER_ADDR": address, "MASTER_PORT": port}
            # Kept on the instance: the center lives as long as this handle.
            self._register_center = create_worker_group_register_center(name=center_name, info=info)
        else:
            timeout = float(os.environ.get("WG_REGISTER_CENTER_TIMEOUT", DEFAULT_REGISTER_CENTER_TIMEOUT))
            info = wait_for_rank_zero_info(center_name, timeout=timeout)
        os.environ.update(info)

    def warm_up(self) -> dict[str, float]:
        """Called once when the rank has started: what takes time and needs no other rank, such as imports.

        It runs while the driver prepares its own part; nothing may fail here that would not fail later.

        Returns:
            Seconds by part, ``startup/<part>``.
        """
        return {}

    @classmethod
    def env_keys(cls) -> list[str]:
        """Environment variables that describe a worker's place."""
        return [
            "WORLD_SIZE",
            "RANK",
            "LOCAL_WORLD_SIZE",
            "LOCAL_RANK",
            "MASTER_ADDR",
            "MASTER_PORT",
            "CUDA_VISIBLE_DEVICES",
        ]

    @property
    def rank(self) -> int:
        """This worker's rank in its group."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of workers in the group."""
        return self._world_size

    def __repr__(self) -> str:
        # Ray puts this in front of the worker's log lines and error messages.
        rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        return f"{type(self).__name__}[rank {rank}/{world_size}]"

    def get_master_addr_port(self) -> tuple[str | None, str | None]:
        """Where the ranks of the group meet."""
        return os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")

    def get_cuda_visible_devices(self) -> str:
        """``CUDA_VISIBLE_DEVICES`` of this process, or ``"not set"``."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "not set")

    def get_node_id(self) -> str:
        """The Ray node that this process runs on."""
        return ray.get_runtime_context().get_node_id()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run ``func(worker, *args, **kwargs)`` on every rank with its part of the rows."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run ``func(*args, **kwargs)`` on rank 0."""
        return func(*args, **kwargs)
