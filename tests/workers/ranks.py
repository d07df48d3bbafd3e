"""Run a function on real gloo ranks: ``run_ranks(fn, world_size, *args)`` returns what each rank returned."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from verl.utils.net_utils import get_free_port

# Imported once, in a server that every rank is forked from: imports are most of what a rank takes to start.
_IMPORTED = ["pytest", "ray", "transformers", "accelerate", "peft", "verl.workers.fsdp_workers", "verl.trainer.config"]


def rank_processes() -> BaseContext:
    """Where ranks are started from; each calls ``take_environment`` first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)  # no effect once the server runs
    return context


def take_environment(environment: dict[str, str]) -> None:
    """Make a rank's environment that of the test that starts it; it begins with that of the server's start."""
    os.environ.clear()
    os.environ.update(environment)


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """``fn(*args)`` in ``world_size`` fresh processes that share a gloo group; results in rank order.

    ``fn`` must be importable (a module-level function). A rank's exception is raised here.
    """
    port = get_free_port()
    rank_processes()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _main,
            (world_size, port, folder, dict(os.environ), fn, args),
            nprocs=world_size,
            start_method="forkserver",
        )
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _main(
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    environment: dict[str, str],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    take_environment(environment)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank)
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    torch.save(fn(*args), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
