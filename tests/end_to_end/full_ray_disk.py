"""Fills the disk under Ray's folder and starts processes; a program, since the disk is mounted for it alone.

Prints a line for each message: what a lost environment process, a lost rank and a second start of Ray say.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ray

from agent_system.environments.session_host import SessionPool
from verl.single_controller.base import Worker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.config import default_config
from verl.trainer.config.failure import failure_report
from verl.trainer.main_ppo import start_ray


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def main(folder: Path) -> None:
    os.environ["RAY_TMPDIR"] = str(folder)
    config = default_config("preset=embedded", "ray_init.num_cpus=4", "trainer.device=cpu")
    start_ray(config)
    before = SessionPool(dict, num_hosts=1)
    before.wait_until_built()
    fill(folder)

    pool = SessionPool(dict, num_hosts=2)
    try:
        pool.wait_until_built()
    except RuntimeError as error:
        sys.stdout.write(f"building: {error}\n")
    [ref] = pool.submit_resets([(0, 0)])
    ray.wait([ref], timeout=60)
    [(_, raw)] = pool.collect(ref)
    sys.stdout.write(f"playing: {raw['error']}\n")
    try:
        RayWorkerGroup(RayResourcePool([1], use_gpu=False), RayClassWithInitArgs(ray.remote(Worker)))
    except RuntimeError as error:
        sys.stdout.write(f"rank: {failure_report(error).splitlines()[-1]}\n")
    sys.stdout.write(f"processes that ran before: {before.num_hosts == len(before.wait_until_built())}\n")
    ray.shutdown()
    try:
        start_ray(config)
    except ValueError as error:
        sys.stdout.write(f"start: {error}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
