"""Ending actors so that no process of theirs is left on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import psutil
import ray
from ray.actor import ActorHandle

from verl.single_controller.base.register_center.ray import register_center_name

__all__ = ["end_actors", "group_processes"]

logger = logging.getLogger(__name__)

# How long a killed actor may take to disappear, and a process that was sent SIGKILL.
_LEAVE_SECONDS = 3.0
_KILL_SECONDS = 10.0


def group_processes(prefix: str) -> list[psutil.Process]:
    """All processes on this machine that were started for the group ``prefix``: ranks, helpers and their children.

    They are known by the variable ``WG_PREFIX`` in their environment, so those whose parent died are found as well.
    """
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("WG_PREFIX") == prefix and process.pid != os.getpid():
                found.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess, OSError):
            continue
    return found


def end_actors(workers: Sequence[ActorHandle], prefix: str, grace_seconds: float) -> None:
    """Ask the actors of a group to leave, and kill those that have not after ``grace_seconds``.

    The group's processes on this machine are waited for, with their children, and in the end killed by signal; those
    on other machines are left to Ray.
    """
    if not ray.is_initialized():
        return
    if workers and grace_seconds > 0:
        # An actor that leaves answers this with an error; one that is stuck does not answer.
        farewells = [worker.__ray_terminate__.remote() for worker in workers]
        ray.wait(farewells, num_returns=len(farewells), timeout=grace_seconds)
    for worker in workers:
        ray.kill(worker, no_restart=True)
    try:
        ray.kill(ray.get_actor(register_center_name(prefix)), no_restart=True)
    except ValueError:
        logger.debug("the register center of %s is gone already", prefix)
    _, left = psutil.wait_procs(group_processes(prefix), timeout=_LEAVE_SECONDS)
    for process in left:
        logger.debug("process %d outlived its worker and is killed", process.pid)
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=_KILL_SECONDS)
