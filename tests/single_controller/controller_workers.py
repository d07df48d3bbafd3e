"""Workers for the tests of the controller."""

import os
import subprocess
import sys
import time

import torch

from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, Execute, register


class Counter(Worker):
    """Adds to what it is given; fails, sleeps and dies on demand."""

    def __init__(self, start=0, fail_on_rank=None):
        super().__init__()
        self.value = start
        if fail_on_rank == self.rank:
            raise ValueError("data.train_batch_size=3 does not divide\nsecond line")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add_rank(self, data, more=None):
        data.batch["a"] += self.rank + self.value
        if more is not None:
            data.batch["a"] += more.batch["b"]
        data.meta_info["rank"] = self.rank
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def add_rank_later(self, data):
        return self.add_rank(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def rows_seen(self, data):
        return len(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def product(self, x, y):
        return x * y

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def own_or_same(self, x):
        return (self.rank, x)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def same(self, x, y=None):
        return (self.rank, x, y)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def on_rank_zero(self, x):
        return (self.rank, x)

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    def direct(self):
        return None

    @register(
        dispatch_mode={
            "dispatch_fn": lambda group, x: ((list(range(x, x + group.world_size)),), {}),
            "collect_fn": lambda group, output: sum(output),
        }
    )
    def custom(self, x):
        return x

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def trouble(self, rank, how):
        """On ``rank``: raise, or exit; on the others, when it says so, hang as in a collective."""
        if self.rank == rank:
            if how == "exit":
                os._exit(3)
            raise KeyError("missing")
        if how == "raise_and_hang":
            time.sleep(600)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def all_reduce(self):
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", init_method="env://")
        total = torch.tensor([float(self.rank + 1)])
        torch.distributed.all_reduce(total)
        return total.item()

    def environment(self, key):
        return os.environ.get(key)

    def start_child(self):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        return os.getpid(), child.pid


class Doubler(Counter):
    """Knows the other role in its process."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def neighbour_value(self):
        return self.fused_worker_dict["counter"].value

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, data):
        return DataProto.from_dict({"doubled": data.batch["a"] * 2})


class AsyncWorker(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def add_async(self, data):
        data.batch["a"] += 100 * (self.rank + 1)
        return data
