"""The reward model on one rank, beside policy and critic in the same process."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from verl.models.build import ModelSpec, build_model
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.fs import copy_to_local
from verl.utils.fsdp_utils import create_device_mesh, ensure_process_group, to_torch_dtype
from verl.utils.import_utils import import_external_libs
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.device_state import OffloadedState, choose_device
from verl.workers.memory_ledger import note_memory
from verl.workers.reward_model.dp_reward_model import DataParallelRewardModel
from verl.workers.role_models import sharding_options


class RewardModelWorker(Worker):
    """A frozen classification model with one label, sharded by FSDP2.

    Args:
        config: ``reward_model`` of the config (``RewardModelConfig``).
        device: ``"cuda"`` or ``"cpu"``.
    """

    def __init__(self, config: Any, device: str = "cuda") -> None:
        super().__init__()
        if config.strategy not in ("fsdp", "fsdp2"):
            raise ValueError(f"reward_model.strategy={config.strategy!r}: use fsdp or fsdp2")
        self.config = config
        self.device = choose_device(device)
        ensure_process_group(device)
        import_external_libs(config.model.external_lib)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_training_steps: int | None = None) -> None:
        """Load the model; ``total_training_steps`` is what other roles need and has no meaning here.

        Raises:
            ValueError: the model cannot be used; names the key.
        """
        model = self.config.model
        fsdp = model.fsdp_config
        path = copy_to_local(model.path, use_shm=model.use_shm, key="reward_model.model.path")
        spec = ModelSpec(
            path=path, kind="reward", dtype=to_torch_dtype(fsdp.model_dtype), trust_remote_code=model.trust_remote_code
        )
        mesh = create_device_mesh(dist.get_world_size(), fsdp.fsdp_size, self.device.type)
        module = build_model(spec, mesh, sharding_options(fsdp, self.device.type))
        module.requires_grad_(False)
        tokenizer = policy_tokenizer = None
        if model.input_tokenizer is not None:
            tokenizer = hf_tokenizer(path, trust_remote_code=model.trust_remote_code)
            policy_path = copy_to_local(model.input_tokenizer, key="reward_model.model.input_tokenizer")
            policy_tokenizer = hf_tokenizer(policy_path, trust_remote_code=model.trust_remote_code)
            if tokenizer.chat_template is None:
                raise ValueError(
                    f"reward_model.model.path={model.path} has no chat template to render conversations with: use "
                    "reward_model.model.input_tokenizer=null if it reads the policy's token ids"
                )
        self.state = OffloadedState(module, None, self.device, fsdp.param_offload)
        self.model = DataParallelRewardModel(self.config, module, tokenizer, policy_tokenizer, self.device)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """``rm_scores`` of the rows, float32 ``(N, R)``: the model's score on each row's last response token."""
        with self.state.loaded():
            scores = self.model.compute_rm_score(data)
        note_memory(self.device, "reward_model")
        return DataProto.from_dict(tensors={"rm_scores": scores})
