"""The register center on Ray: a named actor that holds what rank 0 publishes."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.actor import ActorHandle

__all__ = [
    "WorkerGroupRegisterCenter",
    "create_worker_group_register_center",
    "register_center_name",
    "wait_for_rank_zero_info",
]

_POLL_SECONDS = 0.05


@ray.remote(num_cpus=0)
class WorkerGroupRegisterCenter:
    """Holds ``MASTER_ADDR`` and ``MASTER_PORT`` of one worker group."""

    def __init__(self, rank_zero_info: dict[str, str]) -> None:
        self._rank_zero_info = rank_zero_info

    def get_rank_zero_info(self) -> dict[str, str]:
        return self._rank_zero_info


def register_center_name(prefix: str) -> str:
    """The name under which the center of the group ``prefix`` is found."""
    return f"{prefix}_register_center"


def create_worker_group_register_center(name: str, info: dict[str, str]) -> ActorHandle:
    """Start a center called ``name`` that answers with ``info``."""
    return WorkerGroupRegisterCenter.options(name=name).remote(info)


def wait_for_rank_zero_info(name: str, timeout: float) -> dict[str, Any]:
    """What rank 0 published under ``name``; ``TimeoutError`` after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            center = ray.get_actor(name)
            return ray.get(center.get_rank_zero_info.remote(), timeout=max(0.1, deadline - time.monotonic()))
        except (ValueError, ray.exceptions.GetTimeoutError):
            if time.monotonic() >= deadline:
                break
        time.sleep(_POLL_SECONDS)
    raise TimeoutError(
        f"waited {timeout:g} s for rank 0 to publish its address in the actor {name!r}; rank 0 may have failed or its "
        "node may be slow. Look for its error above, or raise trainer.ray_wait_register_center_timeout"
    )
