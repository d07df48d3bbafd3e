"""Write a sharded model as a plain Hugging Face folder.

Parameters are gathered one at a time; rank 0 keeps them in host memory in the export dtype and writes safetensors.
LoRA adapters are merged into the weights they modify.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from torch import nn
from torch.distributed.tensor import DTensor

from verl.utils.fs import open_to_readers
from verl.utils.fsdp_utils import reshard

logger = logging.getLogger(__name__)


@torch.no_grad()
def full_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """``(name, full tensor)`` of every distinct parameter, in model order. Collective: all ranks iterate to the end."""
    reshard(model)
    for name, param in model.named_parameters():
        yield name, param.full_tensor() if isinstance(param, DTensor) else param.detach()


@torch.no_grad()
def merged_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Like ``full_parameters`` with LoRA merged and names as in the base model.

    ``W + scaling * B A`` replaces ``W``; adapters themselves are not yielded.
    """
    scaling = {
        name: module.scaling["default"] for name, module in model.named_modules() if hasattr(module, "lora_A")
    }
    pending: dict[str, torch.Tensor] = {}
    for name, tensor in full_parameters(model):
        owner = next((o for o in (name.split(".base_layer.")[0], name.split(".lora_")[0]) if o in scaling), None)
        if owner is None or name == f"{owner}.base_layer.bias":
            yield name.replace(".base_layer.", "."), tensor
        elif ".lora_A." in name:
            pending["A"] = tensor
        elif ".lora_B." in name:
            weight = pending["W"].float() + scaling[owner] * (tensor.float() @ pending["A"].float())
            yield f"{owner}.weight", weight.to(pending["W"].dtype)
            pending.clear()
        else:
            pending["W"] = tensor


def export_model(
    model: nn.Module, folder: str | Path, tokenizer: Any | None = None, dtype: torch.dtype | None = None
) -> None:
    """Write ``model`` to ``folder``: safetensors, config, generation config, tokenizer. Collective; rank 0 writes.

    Args:
        model: an (FSDP2-sharded) transformers model.
        folder: created if missing.
        tokenizer: saved alongside when given.
        dtype: dtype of the written weights; None keeps the parameters' own.
    """
    folder = Path(folder)
    is_writer = dist.get_rank() == 0
    state: dict[str, torch.Tensor] = {}
    for name, tensor in merged_parameters(model):
        if is_writer:
            state[name] = tensor.to(device="cpu", dtype=dtype or tensor.dtype, copy=True)
    if is_writer:
        folder.mkdir(parents=True, exist_ok=True)
        save_torch_state_dict(state, str(folder), metadata={"format": "pt"})
        save_model_description(model, folder, tokenizer, dtype)
        open_to_readers(folder)
        logger.info("model written to %s", folder)
    dist.barrier()


def save_model_description(
    model: nn.Module, folder: str | Path, tokenizer: Any | None, dtype: torch.dtype | None = None
) -> None:
    """Everything beside the weights: ``config.json``, ``generation_config.json``, tokenizer files."""
    config = type(model.config).from_dict(model.config.to_dict())
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.use_cache = True
    config.dtype = dtype or next(model.parameters()).dtype
    config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
