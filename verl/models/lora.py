"""LoRA through peft, injected in place: the model keeps its class and its parameter names.

``model.layers.0.self_attn.q_proj.weight`` becomes ``….q_proj.base_layer.weight`` beside
``….q_proj.lora_A.default.weight`` and ``….lora_B.default.weight``. The reference policy is the same model
with the adapters off.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from verl.utils.fs import open_to_readers

if TYPE_CHECKING:
    from peft import LoraConfig

logger = logging.getLogger(__name__)

ADAPTER = "default"


@dataclass(frozen=True)
class LoraSettings:
    """``rank`` > 0; the update is scaled by ``alpha / rank``. ``target_modules`` as peft takes it.

    ``head`` names a module outside the decoder that is trained whole and gets no adapter: a critic's value head starts
    from random numbers, and an adapter could only add to them.
    """

    rank: int
    alpha: float
    target_modules: str | tuple[str, ...] = "all-linear"
    head: str | None = None

    @property
    def task_type(self) -> str:
        """peft's name for what the model does."""
        return "TOKEN_CLS" if self.head else "CAUSAL_LM"

    def trains(self, name: str) -> bool:
        """Whether the parameter of that name is trained."""
        return "lora_" in name or (self.head is not None and name.startswith(f"{self.head}."))

    def peft_config(self) -> LoraConfig:
        """The equivalent peft config; peft is imported only where it is used."""
        from peft import LoraConfig

        targets = self.target_modules if isinstance(self.target_modules, str) else list(self.target_modules)
        return LoraConfig(
            task_type=self.task_type,
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=targets,
            exclude_modules=[self.head] if self.head else None,
            bias="none",
        )


def add_lora(model: nn.Module, settings: LoraSettings) -> nn.Module:
    """Inject trainable adapters and freeze the rest but the head of ``settings``, in place.

    Raises:
        ValueError: ``target_modules`` names something that is no linear layer of the decoder.
    """
    from peft import inject_adapter_in_model

    try:
        inject_adapter_in_model(settings.peft_config(), model, adapter_name=ADAPTER)
    except (ValueError, re.error) as error:
        raise ValueError(_refusal(model, settings, str(error).split(". ")[0])) from error
    _check_targets(model, settings)
    for name, param in model.named_parameters():
        param.requires_grad_(settings.trains(name))
        param.data = param.data.to(model.dtype) if not param.is_meta else param.data
    return model


def _check_targets(model: nn.Module, settings: LoraSettings) -> None:
    """Every adapter sits on a linear layer that the packed forward runs, and every name that was listed has one.

    peft takes a list of which a single name fits; and the packed forward reads the weight of the output layer, so that
    an adapter there would never learn.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    targets = settings.target_modules
    listed = [] if isinstance(targets, str) else targets
    absent = [one for one in listed if not any(name == one or name.endswith(f".{one}") for name in adapted)]
    if absent:
        raise ValueError(_refusal(model, settings, f"no module is called {absent[0]}"))
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for name, module in adapted.items():
        if module is output or not isinstance(module.get_base_layer(), nn.Linear):
            raise ValueError(_refusal(model, settings, f"{name} is no linear layer of the decoder"))


def _refusal(model: nn.Module, settings: LoraSettings, reason: str) -> str:
    key = "critic.model.target_modules" if settings.head else "model.target_modules"
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linear = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(getattr(module, "base_layer", module), nn.Linear) and module is not output
    }
    names = ", ".join(sorted(linear - {"base_layer", ADAPTER, settings.head}))
    given = settings.target_modules if isinstance(settings.target_modules, str) else list(settings.target_modules)
    return f"{key}={given}: {reason}; use all-linear, or a list of the decoder's linear layers ({names})"


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model without its adapters, for reference log-probabilities."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    assert layers, "the model has no adapters"
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def save_adapter(folder: str | Path, state: Mapping[str, torch.Tensor], settings: LoraSettings, base: str) -> None:
    """Write ``adapter_model.safetensors`` and ``adapter_config.json`` as peft reads them.

    Args:
        state: full tensors by name; those that are not trained are left out.
        base: the base model's path, recorded in the adapter config.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        "base_model.model." + name.replace(f".{ADAPTER}.", "."): tensor.contiguous()
        for name, tensor in state.items()
        if settings.trains(name)
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = settings.peft_config().to_dict()
    config.update(base_model_name_or_path=base, peft_type="LORA", inference_mode=True)
    adapted = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in tensors if ".lora_" in name}
    config.update(
        task_type=settings.task_type,
        target_modules=sorted(adapted),
        modules_to_save=[settings.head] if settings.head else None,
    )
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, default=str), encoding="utf-8")
    open_to_readers(folder)
