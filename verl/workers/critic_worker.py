"""The value network's worker; its update is in ``critic``."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.flops_counter import FlopsCounter
from verl.utils.fs import copy_to_local
from verl.utils.fsdp_utils import create_device_mesh, ensure_process_group
from verl.utils.import_utils import import_external_libs
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.checkpointed_worker import CheckpointedWorker, utilisation
from verl.workers.critic import DataParallelPPOCritic
from verl.workers.device_state import OffloadedState, choose_device
from verl.workers.memory_ledger import memory_of_phases, note_memory
from verl.workers.role_models import build_lr_scheduler, build_optimizer, build_role_model, lora_settings


class CriticWorker(CheckpointedWorker):
    """The value network on one rank.

    Args:
        config: ``critic`` of the config (``CriticConfig``).
        device: ``"cuda"`` or ``"cpu"``.
        response_length: ``data.max_response_length``; needed by ``loss_agg_mode=seq-mean-token-sum-norm`` alone.
    """

    def __init__(self, config: Any, device: str = "cuda", response_length: int | None = None) -> None:
        super().__init__()
        if config.strategy not in ("fsdp", "fsdp2"):
            raise ValueError(f"critic.strategy={config.strategy!r}: use fsdp or fsdp2")
        self.config = config
        self.response_length = response_length
        self.device = choose_device(device)
        ensure_process_group(device)
        import_external_libs(config.model.external_lib)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_training_steps: int | None = None) -> None:
        """Load the model and its optimiser."""
        config, model = self.config, self.config.model
        fsdp = model.fsdp_config
        path = copy_to_local(model.path, use_shm=model.use_shm, key="critic.model.path")
        tokenizer = hf_tokenizer(
            copy_to_local(model.tokenizer_path or model.path, key="critic.model.tokenizer_path"),
            trust_remote_code=model.trust_remote_code,
        )
        mesh = create_device_mesh(dist.get_world_size(), fsdp.fsdp_size, self.device.type)
        self.module = build_role_model(model, fsdp, path, mesh, kind="value")
        self.optimizer = build_optimizer(self.module, config.optim)
        self.scheduler = build_lr_scheduler(self.optimizer, config.optim, total_training_steps)
        self.state = OffloadedState(
            self.module, self.optimizer, self.device, fsdp.param_offload, fsdp.optimizer_offload
        )
        self.critic = DataParallelPPOCritic(config, self.module, self.optimizer, self.response_length, self.device)
        self.flops = FlopsCounter(self.module.config)
        self.checkpoints = FSDPCheckpointManager(
            self.module,
            self.optimizer,
            self.scheduler,
            tokenizer,
            contents=config.checkpoint.contents,
            lora=lora_settings(model, kind="value"),
            base_path=path,
            optim_section="critic.optim",
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        """``values`` of the rows, float32 ``(N, R)``."""
        with self.state.loaded():
            values = self.critic.compute_values(data)
        note_memory(self.device, "values")
        return DataProto.from_dict(tensors={"values": values})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto) -> DataProto:
        """Take the optimiser steps of a training step; ``meta_info["metrics"]`` holds what happened, over all ranks."""
        started = time.perf_counter()
        with self.state.loaded(with_optimizer=True):
            metrics = self.critic.update_critic(data)
        seconds = time.perf_counter() - started
        note_memory(self.device, "update_critic")
        metrics["perf/mfu/critic"] = utilisation(
            self.flops, data, seconds, self.config.ppo_epochs, self.device, has_head=False
        )
        metrics["critic/lr"] = self.scheduler.get_last_lr()[0]
        metrics.update(memory_of_phases(self.device))
        self.scheduler.step()
        return DataProto(meta_info={"metrics": metrics})
