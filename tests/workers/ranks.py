"""Run a function on real gloo ranks: ``run_ranks(fn, world_size, *args)`` returns what each rank returned."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from verl.utils.net_utils import get_free_port


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """``fn(*args)`` in ``world_size`` fresh processes that share a gloo group; results in rank order.

    ``fn`` must be importable (a module-level function). A rank's exception is raised here.
    """
    port = get_free_port()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_main, (world_size, port, folder, fn, args), nprocs=world_size)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _main(rank: int, world_size: int, port: int, folder: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank)
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    torch.save(fn(*args), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
