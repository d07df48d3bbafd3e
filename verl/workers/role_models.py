"""From config sections to models, optimisers and schedules of a role."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LambdaLR
from transformers import GenerationConfig, PreTrainedTokenizerBase

from verl.models.build import ModelSpec, build_model
from verl.models.heads import VALUE_HEAD
from verl.models.lora import LoraSettings
from verl.utils.fsdp_utils import SMALL_MODEL, ShardingOptions, parameters_to_keep_gathered, to_torch_dtype
from verl.utils.lr_schedule import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    warmup_steps,
)


def lora_settings(model: Any, kind: str = "causal_lm") -> LoraSettings | None:
    """``lora_rank``, ``lora_alpha``, ``target_modules`` of a model section; None when LoRA is off.

    ``kind`` is that of ``ModelSpec``: a value model's head is trained whole.
    """
    if model.lora_rank <= 0:
        return None
    targets = model.target_modules
    targets = targets if isinstance(targets, str) else tuple(targets)
    return LoraSettings(model.lora_rank, model.lora_alpha, targets, VALUE_HEAD if kind == "value" else None)


def sharding_options(fsdp: Any, device: str, compile_layers: bool = False) -> ShardingOptions:
    """``fsdp_config`` as sharding options. On CPU nothing is offloaded: everything is in host memory already."""
    param_dtype = to_torch_dtype(fsdp.mixed_precision.param_dtype)
    reduce_dtype = to_torch_dtype(fsdp.mixed_precision.reduce_dtype)
    return ShardingOptions(
        param_dtype=param_dtype if param_dtype != to_torch_dtype(fsdp.model_dtype) else None,
        reduce_dtype=reduce_dtype if reduce_dtype != param_dtype else None,  # gradients come in the dtype of compute
        reshard_after_forward=fsdp.reshard_after_forward,
        cpu_offload=bool(getattr(fsdp, "offload_policy", False)) and device == "cuda",
        compile_layers=compile_layers and device == "cuda",
        whole_below=SMALL_MODEL,
        gathered_below=parameters_to_keep_gathered(device, param_dtype),
    )


def build_role_model(
    model: Any,
    fsdp: Any,
    path: str,
    mesh: DeviceMesh,
    *,
    kind: str = "causal_lm",
    trainable: bool = True,
    compile_layers: bool = False,
    like: nn.Module | None = None,
) -> nn.Module:
    """The sharded model of a role. Collective.

    Args:
        model: the ``model`` section of actor or critic.
        fsdp: its ``fsdp_config``.
        path: local model folder.
        kind: see ``ModelSpec``.
        trainable: False for a reference: no adapters, no checkpointing, nothing for an optimiser. Its parameters say
            that they require gradients like the policy's, as compiled code is checked against that: what was compiled
            for log-probabilities of the one serves the other.
        like: see ``build_model``.
    """
    spec = ModelSpec(
        path=path,
        kind=kind,
        dtype=to_torch_dtype(fsdp.model_dtype),
        override_config=dict(model.override_config),
        gradient_checkpointing=trainable and model.enable_gradient_checkpointing,
        trust_remote_code=model.trust_remote_code,
        lora=lora_settings(model, kind) if trainable else None,
    )
    module = build_model(spec, mesh, sharding_options(fsdp, mesh.device_type, compile_layers), like)
    if not trainable:
        module.eval()
    return module


def build_optimizer(module: nn.Module, optim: Any) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, fused on CUDA."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        trainable,
        lr=optim.lr,
        betas=tuple(optim.betas),
        weight_decay=optim.weight_decay,
        fused=trainable[0].is_cuda,
    )


def build_lr_scheduler(
    optimizer: torch.optim.Optimizer, optim: Any, total_training_steps: int | None
) -> LambdaLR:
    """The schedule of an ``optim`` section; ``total_training_steps`` overrides the section's (injected) number."""
    total = total_training_steps if total_training_steps is not None else optim.total_training_steps
    warmup = warmup_steps(optim.lr_warmup_steps, optim.lr_warmup_steps_ratio, max(total, 0))
    if optim.warmup_style == "constant":
        return get_constant_schedule_with_warmup(optimizer, warmup)
    if optim.warmup_style == "cosine":
        if total <= 0:
            raise ValueError("optim.warmup_style=cosine needs optim.total_training_steps (or trainer.total_epochs)")
        return get_cosine_schedule_with_warmup(optimizer, warmup, total, optim.min_lr_ratio, optim.num_cycles)
    raise ValueError(f"optim.warmup_style={optim.warmup_style!r}: use constant or cosine")


def end_token_ids(tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig | None) -> tuple[int, ...]:
    """Every token that ends a response: the tokenizer's and the generation config's, without repeats."""
    listed = generation.eos_token_id if generation is not None else None
    listed = listed if isinstance(listed, (list, tuple)) else [listed]
    ids = [tokenizer.eos_token_id, *listed]
    return tuple(dict.fromkeys(int(i) for i in ids if i is not None))
