"""What the ranks of every trained role share: saving and loading, and how well an update used its device."""

from __future__ import annotations

import torch
import torch.distributed as dist

from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.flops_counter import FlopsCounter, get_device_flops
from verl.workers.rows import response_mask_of


class CheckpointedWorker(Worker):
    """A role with weights of its own to save and load: ``state`` and ``checkpoints`` come with its ``init_model``."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Write model, optimiser, scheduler and random state to ``local_path``."""
        with self.state.loaded(with_optimizer=True):
            self.checkpoints.save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Continue from what ``save_checkpoint`` wrote."""
        with self.state.loaded(with_optimizer=True):
            self.checkpoints.load_checkpoint(local_path, hdfs_path, del_local_after_load)


def utilisation(
    flops: FlopsCounter, data: DataProto, seconds: float, epochs: int, device: torch.device, has_head: bool = True
) -> float:
    """Model FLOPs utilisation of an update over all ranks; 0 where the device's peak is unknown."""
    mask = response_mask_of(data)
    head_tokens = mask.sum().to(device)
    dist.all_reduce(head_tokens)
    lengths = data.meta_info.get("global_token_num")
    peak = get_device_flops("B") if device.type == "cuda" else float("inf")
    if lengths is None or peak == float("inf"):
        return 0.0
    done = flops.training_flops(lengths, int(head_tokens) if has_head else 0) * epochs
    return done / seconds / (peak * dist.get_world_size())
