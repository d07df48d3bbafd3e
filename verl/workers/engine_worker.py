"""A rank that only generates: a rollout engine with the weights of a model folder, no trainer beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from transformers import AutoModelForCausalLM

from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.fs import copy_to_local
from verl.utils.fsdp_utils import ensure_process_group
from verl.utils.import_utils import import_external_libs
from verl.utils.model import get_generation_config
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.device_state import choose_device
from verl.workers.role_models import end_token_ids
from verl.workers.rollout.base import RolloutRequest, RolloutResult
from verl.workers.rollout.factory import build_rollout_engine


class EngineWorker(Worker):
    """The engine of one rank; it has the face that ``WorkerGroupClient`` needs.

    Args:
        model, rollout: the sections of ``generation.yaml``.
        device: ``"cuda"`` or ``"cpu"``.
    """

    def __init__(self, model: Any, rollout: Any, device: str = "cuda") -> None:
        super().__init__()
        self.model, self.rollout = model, rollout
        self.device = choose_device(device)
        ensure_process_group(device)
        import_external_libs(model.external_lib)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Start the engine and read the weights."""
        path = copy_to_local(self.model.path, use_shm=self.model.use_shm, key="model.path")
        trust = self.model.trust_remote_code
        read_by_engine = self.rollout.name == "vllm"
        dummy = self.rollout.load_format.startswith("dummy")
        tokenizer = hf_tokenizer(path, trust_remote_code=trust)
        self.engine = build_rollout_engine(
            replace(
                self.rollout,
                load_format="auto" if dummy else self.rollout.load_format,
                free_cache_engine=False,  # nothing else on the GPU needs the memory
            ),
            path,
            eos_token_ids=end_token_ids(tokenizer, get_generation_config(path, trust)),
            device=self.device.type,
            seed=self.rollout.seed,
            trust_remote_code=trust,
        )
        if not read_by_engine:
            weights = AutoModelForCausalLM.from_pretrained(
                path, dtype=self.engine.settings.dtype, trust_remote_code=trust
            )
            self.engine.load_weights(weights.named_parameters(remove_duplicate=False))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_layout(self) -> tuple[int, int]:
        """``(replica, rank within its tensor-parallel group)``."""
        return divmod(dist.get_rank(), self.rollout.ranks_per_engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_rollout(self) -> dict[str, float]:
        """The engine is always ready."""
        return {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_rollout(self) -> dict[str, float]:
        """Requests that are still running are forgotten."""
        self.engine.abort_all()
        return {}

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def rollout_step(self, requests: Sequence[RolloutRequest], max_steps: int) -> list[RolloutResult]:
        """As in ``ActorRolloutRefWorker``: all ranks of a replica must get the same call."""
        return self.engine.step(requests, max_steps)
