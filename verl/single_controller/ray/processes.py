"""Ending actors so that no process of theirs is left on this machine."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import psutil
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

__all__ = ["end_actors", "local_processes"]

logger = logging.getLogger(__name__)

_KILL_WAIT_SECONDS = 10.0


def local_processes(workers: Sequence[ActorHandle], timeout: float) -> list[psutil.Process]:
    """The processes of those workers that run on this machine, as far as they answer within ``timeout`` seconds."""
    here = ray.get_runtime_context().get_node_id()
    refs = [worker.get_process_info.remote() for worker in workers if hasattr(worker, "get_process_info")]
    answered, _ = ray.wait(refs, num_returns=len(refs), timeout=timeout) if refs else ([], [])
    processes = []
    for ref in answered:
        try:
            info = ray.get(ref, timeout=timeout)
            if info["node_id"] == here:
                processes.append(psutil.Process(info["pid"]))
        except (RayError, psutil.NoSuchProcess) as error:
            logger.debug("a worker is gone already: %s", error)
    return processes


def end_actors(
    workers: Sequence[ActorHandle],
    processes: Sequence[psutil.Process],
    center_name: str | None,
    grace_seconds: float,
) -> None:
    """Ask the actors to leave, kill those that have not after ``grace_seconds``, and the register center with them.

    ``processes`` (the actors' own on this machine) are waited for, with their children, and in the end killed by
    signal; processes on other machines are left to Ray.
    """
    if not ray.is_initialized():
        return
    family = _with_children(processes)
    if workers and grace_seconds > 0:
        # An actor that leaves answers this with an error; one that is stuck does not answer.
        farewells = [worker.__ray_terminate__.remote() for worker in workers]
        ray.wait(farewells, num_returns=len(farewells), timeout=grace_seconds)
    for worker in workers:
        ray.kill(worker, no_restart=True)
    if center_name is not None:
        try:
            ray.kill(ray.get_actor(center_name), no_restart=True)
        except ValueError:
            logger.debug("the register center %s is gone already", center_name)
    _, left = psutil.wait_procs(family, timeout=_KILL_WAIT_SECONDS)
    for process in left:
        logger.warning("process %d outlived its worker by %g s and is killed", process.pid, _KILL_WAIT_SECONDS)
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=_KILL_WAIT_SECONDS)


def _with_children(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    family: list[psutil.Process] = []
    for process in processes:
        try:
            family += [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return family
