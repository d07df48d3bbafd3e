"""From shards to one model: names as in the base model, adapters merged or apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from verl.model_merger.shards import ShardReader

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
_PEFT_PREFIX = "base_model.model."
_CHUNK_BYTES = 1 << 30


@dataclass(frozen=True)
class Adapter:
    """LoRA on one linear layer; names are those in the shards."""

    owner: str  # module path in the base model, such as model.layers.0.self_attn.q_proj
    base: str
    a: str
    b: str

    @torch.no_grad()
    def delta(self, tensors: dict[str, torch.Tensor], scale: float) -> torch.Tensor:
        """What it adds to the weight: ``scale * B A``, float32 ``(out, in)``."""
        return scale * (tensors[self.b].float() @ tensors[self.a].float())


def clean_name(name: str) -> str:
    """A name in the shards as the base model has it: without wrappers, ``base_layer`` left out."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix(_PEFT_PREFIX).replace(".base_layer.", ".")


def find_adapters(reader: ShardReader) -> list[Adapter]:
    """The adapters among the shards, in model order; empty for a model without.

    Raises:
        ValueError: a factor without its counterpart, or adapters of a kind that is not understood.
    """
    adapters, used = [], set()
    for name in reader.shapes:
        if ".lora_A." not in name:
            continue
        b = name.replace(".lora_A.", ".lora_B.")
        base = name.split(".lora_A.")[0] + ".base_layer.weight"
        absent = next((one for one in (b, base) if one not in reader.shapes), None)
        if absent is not None:
            raise ValueError(f"the checkpoint has {name} but not {absent}: it cannot be merged")
        adapters.append(Adapter(clean_name(base).removesuffix(".weight"), base, name, b))
        used |= {name, b}
    strange = [name for name in reader.shapes if ".lora_" in name and name not in used]
    if strange:
        raise ValueError(f"{strange[0]} is no LoRA factor of a linear layer; such adapters cannot be merged")
    return adapters


def adapter_scale(folder: Path) -> float:
    """``lora_alpha / r`` (``/ sqrt(r)`` with rank-stabilised LoRA) of ``lora_adapter/adapter_config.json``.

    Raises:
        ValueError: the file is missing, damaged, or describes adapters with other scales per layer.
    """
    file = folder / "lora_adapter" / "adapter_config.json"
    if not file.is_file():
        raise ValueError(f"the checkpoint holds LoRA adapters, but {file}, which has their scale, is missing")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        rank, alpha = float(config["r"]), float(config["lora_alpha"])
        if config.get("use_dora") or config.get("rank_pattern") or config.get("alpha_pattern"):
            raise ValueError(f"{file} has use_dora, rank_pattern or alpha_pattern, which cannot be merged here")
        return alpha / (rank**0.5 if config.get("use_rslora") else rank)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__} {error}") from error


def merged_state(
    reader: ShardReader, adapters: list[Adapter], scale: float, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Every tensor of the model under its base model's name, adapters merged.

    Adapters are added in float32, before the cast. At most about 1 GiB beside the result is held at a time.

    Args:
        dtype: of floating-point tensors; None keeps theirs.
    """
    by_base = {adapter.base: adapter for adapter in adapters}
    factors = {name for adapter in adapters for name in (adapter.a, adapter.b)}
    state: dict[str, torch.Tensor] = {}
    for names in _chunks(reader, [name for name in reader.shapes if name not in factors]):
        wanted = [one for n in names for one in ([n, by_base[n].a, by_base[n].b] if n in by_base else [n])]
        tensors = reader.load(wanted)
        for name in names:
            tensor = tensors.pop(name)
            kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            if name in by_base:
                tensor = tensor.float() + by_base[name].delta(tensors, scale)
            state[clean_name(name)] = tensor.to(kept)
    return state


def _chunks(reader: ShardReader, names: list[str]) -> Iterator[list[str]]:
    """Consecutive names whose tensors make up about a GiB."""
    chunk: list[str] = []
    size = 0
    for name in names:
        chunk.append(name)
        size += reader.shapes[name].numel() * reader.dtypes[name].itemsize
        if size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
