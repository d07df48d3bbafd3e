"""What a rank can do: ``ActorRolloutRefWorker`` here, ``CriticWorker`` and ``RewardModelWorker`` from their modules.

One process holds the shard of the policy, the rollout engine, the reference policy and, beside them, critic and reward
model. The order of life is: process group, models, engine last, so that the engine sees what memory is left and joins
the group there is.
Building models is in ``role_models``, the update in ``actor`` and ``critic``, sampling in ``rollout``.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from verl.models.compile_threads import share_compile_threads
from verl.models.heads import forward_log_probs
from verl.models.lora import adapters_off
from verl.models.packing import pack_rows
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.flops_counter import FlopsCounter
from verl.utils.fs import copy_to_local
from verl.utils.fsdp_utils import create_device_mesh, decoder_layers, ensure_process_group, reshard, to_torch_dtype
from verl.utils.import_utils import import_external_libs
from verl.utils.model import get_generation_config
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.actor import DataParallelPPOActor
from verl.workers.checkpointed_worker import CheckpointedWorker, utilisation
from verl.workers.critic_worker import CriticWorker
from verl.workers.device_state import OffloadedState, choose_device
from verl.workers.memory_ledger import memory_ledger, memory_metrics, memory_of_phases, note_memory
from verl.workers.one_shot import generate_rows
from verl.workers.reward_model import RewardModelWorker
from verl.workers.role_models import (
    build_lr_scheduler,
    build_optimizer,
    build_role_model,
    end_token_ids,
    lora_settings,
)
from verl.workers.rollout.base import RolloutRequest, RolloutResult
from verl.workers.rollout.factory import build_rollout_engine, import_engine
from verl.workers.rollout.model_fit import sleep_hint
from verl.workers.sharding_manager import HybridEngine
from verl.workers.step_costs import StepCosts
from verl.workers.update_loop import MicroBatchPlan

logger = logging.getLogger(__name__)

__all__ = ["ActorRolloutRefWorker", "CheckpointedWorker", "CriticWorker", "RewardModelWorker"]

ROLES = ("actor", "rollout", "ref", "actor_rollout", "actor_rollout_ref")


class ActorRolloutRefWorker(CheckpointedWorker):
    """The policy on one rank, in the roles it is given.

    Args:
        config: ``actor_rollout_ref`` of the config (``ActorRolloutRefConfig``).
        role: one of ``ROLES``; a rollout needs an actor beside it, whose weights it samples from.
        device: ``"cuda"`` or ``"cpu"``.
        requests: the most that all rollout engines together will have at once, if that is known.
    """

    def __init__(self, config: Any, role: str, device: str = "cuda", requests: int | None = None) -> None:
        super().__init__()
        if role not in ROLES:
            raise ValueError(f"role {role!r}: use one of {ROLES}")
        if config.actor.strategy not in ("fsdp", "fsdp2"):
            raise ValueError(f"actor_rollout_ref.actor.strategy={config.actor.strategy!r}: use fsdp or fsdp2")
        self.config = config
        self.is_actor = "actor" in role
        self.is_rollout = "rollout" in role
        self.is_ref = "ref" in role
        self._requests = requests
        self._updates = 0
        self.device = choose_device(device)
        ensure_process_group(device)
        import_external_libs(config.model.external_lib)

    # -- set-up -------------------------------------------------------------------------------------------------

    def warm_up(self) -> dict[str, float]:
        """Import the rollout engine: seconds of ``startup/engine_import``; ValueError as from :meth:`init_model`."""
        if not self.is_rollout:
            return {}
        begin = time.perf_counter()
        import_engine(self.config.rollout.name, self.device.type)
        return {"startup/engine_import": time.perf_counter() - begin}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_training_steps: int | None = None) -> dict[str, float]:
        """Load the models and, last, start the engine.

        Args:
            total_training_steps: length of the learning-rate schedule; None takes the config's.

        Returns:
            Seconds of ``startup/model``, ``startup/reference`` and ``startup/engine``.
        """
        seconds: dict[str, float] = {}
        model = self.config.model
        self.path = copy_to_local(model.path, use_shm=model.use_shm, key="actor_rollout_ref.model.path")
        self.tokenizer = hf_tokenizer(self.path, trust_remote_code=model.trust_remote_code)
        self.generation_config = get_generation_config(self.path, model.trust_remote_code)
        parts = {
            "model": (self.is_actor or self.is_rollout, lambda: self._build_actor(total_training_steps)),
            "reference": (self.is_ref, self._build_reference),
            "engine": (self.is_rollout, self._build_engine),
        }
        for name, (wanted, build) in parts.items():
            if wanted:
                begin = time.perf_counter()
                build()
                seconds[f"startup/{name}"] = time.perf_counter() - begin
        if self.device.type == "cuda" and self.config.actor.use_torch_compile:
            share_compile_threads(dist.get_world_size())
        self.costs = StepCosts(self.device)
        return seconds

    def _build_actor(self, total_training_steps: int | None) -> None:
        config = self.config
        fsdp = config.actor.fsdp_config
        mesh = create_device_mesh(dist.get_world_size(), fsdp.fsdp_size, self.device.type)
        self.module = build_role_model(
            config.model, fsdp, self.path, mesh, compile_layers=config.actor.use_torch_compile
        )
        self.optimizer = build_optimizer(self.module, config.actor.optim) if self.is_actor else None
        self.scheduler = None
        if self.optimizer is not None:
            self.scheduler = build_lr_scheduler(self.optimizer, config.actor.optim, total_training_steps)
        self.state = OffloadedState(
            self.module, self.optimizer, self.device, fsdp.param_offload, fsdp.optimizer_offload
        )
        self.actor = DataParallelPPOActor(
            config.actor,
            self.module,
            self.optimizer,
            log_prob_plan=MicroBatchPlan.of_section(config.rollout, "log_prob_", "actor_rollout_ref.rollout"),
            response_length=config.actor.loss_scale_factor or config.rollout.response_length,
            device=self.device,
        )
        self.flops = FlopsCounter(self.module.config)
        self.checkpoints = FSDPCheckpointManager(
            self.module,
            self.optimizer,
            self.scheduler,
            self.tokenizer,
            contents=config.actor.checkpoint.contents,
            lora=lora_settings(config.model),
            base_path=self.path,
            optim_section="actor_rollout_ref.actor.optim",
        )

    def _build_reference(self) -> None:
        """A frozen copy of the model; with LoRA the actor without its adapters serves."""
        self.reference = None
        if lora_settings(self.config.model) is not None and self.is_actor:
            return
        config, fsdp = self.config, self.config.ref.fsdp_config
        mesh = create_device_mesh(dist.get_world_size(), fsdp.fsdp_size, self.device.type)
        module = build_role_model(
            config.model,
            fsdp,
            self.path,
            mesh,
            trainable=False,
            compile_layers=config.ref.use_torch_compile,
            like=self._policy_to_copy(),
        )
        self.reference_state = OffloadedState(module, None, self.device, fsdp.param_offload)
        plan = MicroBatchPlan.of_section(config.ref, "log_prob_", "actor_rollout_ref.ref")
        self.reference = DataParallelPPOActor(config.actor, module, None, log_prob_plan=plan, device=self.device)

    def _policy_to_copy(self) -> nn.Module | None:
        """The policy if it holds what the reference would read: the same shards, in its dtype or in float32.

        Neither of bf16 and fp16 holds the other's values.
        """
        if not (self.is_actor or self.is_rollout):
            return None
        policy, reference = self.config.actor.fsdp_config, self.config.ref.fsdp_config
        exact = to_torch_dtype(policy.model_dtype) in (to_torch_dtype(reference.model_dtype), torch.float32)
        return self.module if exact and policy.fsdp_size == reference.fsdp_size else None

    def _build_engine(self) -> None:
        rollout = self.config.rollout
        self.engine = build_rollout_engine(
            rollout,
            self.path,
            eos_token_ids=end_token_ids(self.tokenizer, self.generation_config),
            device=self.device.type,
            seed=rollout.seed,
            trust_remote_code=self.config.model.trust_remote_code,
            hf_overrides=self.config.model.override_config,
            requests=self._requests,
        )
        self.hybrid = HybridEngine(
            self.module,
            self.engine,
            device=self.device,
            dtype=self.engine.settings.dtype,
            tolerance=rollout.probe_tolerance,
        )

    # -- log-probabilities and update -----------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """``old_log_probs`` and ``entropys`` of the rows under the present policy, both float32 ``(N, R)``."""
        data.meta_info["temperature"] = self.config.rollout.temperature
        with self.state.loaded():
            log_probs, entropys = self.actor.compute_log_prob(data)
        note_memory(self.device, "old_log_prob")
        return DataProto.from_dict(
            tensors={"old_log_probs": log_probs, "entropys": entropys},
            meta_info={"temperature": self.config.rollout.temperature},
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """``ref_log_prob`` of the rows under the reference policy, float32 ``(N, R)``."""
        assert self.is_ref, "this worker has no reference policy"
        data.meta_info.update(temperature=self.config.rollout.temperature, calculate_entropy=False)
        if self.reference is None:
            with self.state.loaded(), adapters_off(self.module):
                log_probs, _ = self.actor.compute_log_prob(data)
        else:
            with self.reference_state.loaded():
                log_probs, _ = self.reference.compute_log_prob(data)
        note_memory(self.device, "ref")
        return DataProto.from_dict(tensors={"ref_log_prob": log_probs})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        """Take the optimiser steps of a training step; ``meta_info["metrics"]`` holds what happened, over all ranks.

        With ``meta_info["profile_dir"]`` each rank writes a profile of one of them into that folder.
        """
        data.meta_info["temperature"] = self.config.rollout.temperature
        folder = data.meta_info.get("profile_dir")
        self.actor.profile_path = Path(folder) / f"update_actor_rank{dist.get_rank()}.txt" if folder else None
        started = time.perf_counter()
        with self.state.loaded(with_optimizer=True):
            metrics = self.actor.update_policy(data)
        seconds = time.perf_counter() - started
        note_memory(self.device, "update_actor")
        metrics["perf/mfu/actor"] = utilisation(self.flops, data, seconds, self.config.actor.ppo_epochs, self.device)
        metrics["perf/optimizer_step_s/mean"] = float(np.mean(self.actor.step_seconds))
        metrics["perf/optimizer_step_s/max"] = float(np.max(self.actor.step_seconds))
        metrics["actor/lr"] = self.scheduler.get_last_lr()[0]
        metrics.update(memory_metrics(self.device) | memory_of_phases(self.device) | self.costs.metrics())
        self.scheduler.step()
        if self.is_rollout:
            self.hybrid.mark_updated()
            self._hint_sleep(int(metrics["perf/recomputed_layers/actor"]))
        return DataProto(meta_info={"metrics": metrics})

    def _hint_sleep(self, recomputed: int) -> None:
        """After the second update, the first one whose activations were measured before, say if sleep would pay."""
        self._updates += 1
        if self._updates == 2 and dist.get_rank() == 0:
            hint = sleep_hint(self.engine.settings, recomputed, len(decoder_layers(self.module)))
            if hint is not None:
                logger.warning(hint)

    # -- rollout --------------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_rollout(self) -> dict[str, float]:
        """Weights into the engine, memory to it; returns timings and the memory ledger.

        Weights that travelled are probed at once, see ``HybridEngine.verify_sync``: ``rollout/probe_gap_mean``.
        """
        metrics = self.hybrid.begin_rollout()
        if metrics["perf/weight_sync/tensors"]:
            started = time.perf_counter()
            metrics |= self.hybrid.verify_sync(self._score)
            metrics["timing_rollout_s/probe"] = time.perf_counter() - started
        return metrics

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_rollout(self) -> dict[str, float]:
        """Memory back to training; returns timings and the memory ledger."""
        return self.hybrid.end_rollout()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def rollout_step(self, requests: Sequence[RolloutRequest], max_steps: int) -> list[RolloutResult]:
        """Hand over new requests, advance by at most ``max_steps`` engine steps, return what finished.

        All ranks of a replica must get the same call.
        """
        return self.engine.step(requests, max_steps)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_layout(self) -> tuple[int, int]:
        """``(replica, rank within its tensor-parallel group)``."""
        return divmod(dist.get_rank(), self.config.rollout.ranks_per_engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_stats(self) -> dict[str, float]:
        """Cumulative counts of the engine."""
        return self.engine.stats()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Answer every prompt once, from weights synced for this call; see ``verl.workers.one_shot``."""
        with self._rollout_phase():
            return generate_rows(self.engine, prompts, self.config.rollout, self.tokenizer.pad_token_id)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def probe(self) -> dict[str, float]:
        """Sync weights and compare log-probabilities of trainer and engine; RuntimeError if they disagree."""
        with self._rollout_phase():
            return self.hybrid.verify(self._score)

    @contextlib.contextmanager
    def _rollout_phase(self) -> Iterator[None]:
        """Begin and end a rollout, unless one is running."""
        if self.hybrid.rolling_out:
            yield
            return
        self.hybrid.begin_rollout()
        try:
            yield
        finally:
            self.hybrid.end_rollout()

    @torch.no_grad()
    def _score(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        """Log-probs at temperature 1 of tokens 1.. of each sequence, by the trainer's model."""
        prompts, responses = [s[:1] for s in sequences], [s[1:] for s in sequences]
        with self.state.loaded():
            self.module.eval()
            packed = pack_rows(prompts, responses, self.device)
            log_probs, _ = forward_log_probs(self.module, packed, 1.0, with_entropy=False)
            reshard(self.module)
            self.module.train()
        return [part.numpy() for part in log_probs.cpu().split([len(r) for r in responses])]

    # -- files and memory -------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Continue from what ``save_checkpoint`` wrote; the engine gets the weights with the next rollout."""
        super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
        if self.is_rollout:
            self.hybrid.mark_updated()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def memory(self) -> dict[str, float]:
        """Memory of this rank now, GiB."""
        return memory_ledger(self.device, "now")
