"""Merging a checkpoint: read, build, write, read back, compare, rename."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import nn

from verl.model_merger.compare import Difference, compare
from verl.model_merger.folder import staged_folder
from verl.model_merger.models import (
    ModelDescription,
    build_model,
    check_forward,
    check_tokenizer,
    copy_tokenizer,
    describe_model,
    load_model,
    write_model,
)
from verl.model_merger.shards import ShardReader, open_shards
from verl.model_merger.state import Adapter, adapter_scale, clean_name, find_adapters, merged_state
from verl.models.build import has_weights
from verl.utils.checkpoint.fsdp_checkpoint_manager import DESCRIPTION_FILE
from verl.utils.fs import copy_to_local
from verl.utils.fsdp_utils import to_torch_dtype

logger = logging.getLogger(__name__)

NO_BASE = "none"
_ADAPTER_FILE = "adapter_model.safetensors"
Say = Callable[[str], None]


@dataclass(frozen=True)
class MergeOptions:
    """What to merge and how.

    Attributes:
        local_dir: the role's folder of a checkpoint, ``…/global_step_N/actor``.
        base_model: folder, hub name or ``pkg://`` path of the model that training started from; None = what the
            checkpoint names; ``"none"`` = do not compare.
        dtype: of the written weights; ``auto`` = that of the base model, bfloat16 where there is none to ask.
        lora: ``merge`` adapters into the weights, or ``keep`` them as a peft folder.
        is_value_model: the checkpoint is a critic; its config says so where this trainer wrote it.
        tie_word_embedding: input and output embeddings are one tensor, whatever the config says.
    """

    local_dir: Path
    base_model: str | None = None
    dtype: str = "auto"
    lora: Literal["merge", "keep"] = "merge"
    is_value_model: bool = False
    tie_word_embedding: bool = False
    trust_remote_code: bool = False


class CheckpointModel:
    """The model in a checkpoint, as far as it is known without reading its tensors.

    Raises:
        ValueError: no complete checkpoint, no config, or a base model that is not here.
    """

    def __init__(self, options: MergeOptions) -> None:
        self.options = options
        self.folder = options.local_dir.expanduser()
        self.reader: ShardReader = open_shards(self.folder)
        inner = self.folder / "huggingface"
        described = inner if not (self.folder / "config.json").is_file() and inner.is_dir() else self.folder
        self.description = describe_model(described, options.is_value_model or None, options.trust_remote_code)
        if options.tie_word_embedding:
            self.description.config.tie_word_embeddings = True
        self.adapters: list[Adapter] = find_adapters(self.reader)
        self.scale = adapter_scale(self.folder) if self.adapters else 1.0
        if options.lora == "keep" and not self.adapters:
            raise ValueError(f"--lora keep: {self.folder} has no LoRA adapters, all its weights were trained")
        self.base = self._find_base()
        self.dtype = self._choose_dtype()

    def model(self, dtype: torch.dtype | None) -> nn.Module:
        """The whole model, adapters merged."""
        return build_model(self.description, merged_state(self.reader, self.adapters, self.scale, dtype), dtype)

    def bytes_to_write(self) -> int:
        """Size of the merged weights."""
        factors = {name for adapter in self.adapters for name in (adapter.a, adapter.b)}
        sizes = {name: shape.numel() for name, shape in self.reader.shapes.items() if name not in factors}
        return sum(count * (self.dtype or self.reader.dtypes[name]).itemsize for name, count in sizes.items())

    def _find_base(self) -> Path | None:
        given = self.options.base_model
        if given is not None and given.lower() == NO_BASE:
            return None
        name = given or recorded_base(self.folder)
        if not name:
            raise ValueError(
                f"{self.folder} does not say which model it was trained from: give --base_model PATH, or "
                f"--base_model {NO_BASE} to leave out the comparison with it"
            )
        try:
            base = Path(copy_to_local(name, key="--base_model"))
        except (FileNotFoundError, ValueError) as error:
            remedy = "" if given else f"; the checkpoint names it, give --base_model PATH or --base_model {NO_BASE}"
            raise ValueError(f"{error}{remedy}") from error
        if not has_weights(str(base)):
            raise ValueError(
                f"--base_model {base} has no weights to compare with (training began from random ones): give "
                f"--base_model {NO_BASE}"
            )
        return base

    def _choose_dtype(self) -> torch.dtype:
        if self.options.dtype != "auto":
            return to_torch_dtype(self.options.dtype)
        if self.base is None:
            return torch.bfloat16
        declared = describe_model(self.base, None, self.options.trust_remote_code).config.dtype
        return declared if isinstance(declared, torch.dtype) else torch.bfloat16


def recorded_base(folder: Path) -> str | None:
    """The model that a checkpoint was trained from, as its files or its run's configuration name it."""
    for file, key in (
        (folder / DESCRIPTION_FILE, "base_model"),
        (folder / "lora_adapter" / "adapter_config.json", "base_model_name_or_path"),
    ):
        name = _load(file, json.loads).get(key) if file.is_file() else None
        if name:
            return str(name)
    run = folder.absolute().parent.parent / "resolved_config.yaml"
    if not run.is_file():
        return None
    config = _load(run, yaml.safe_load)
    role = "critic" if folder.name == "critic" else "actor_rollout_ref"
    return (config.get(role) or {}).get("model", {}).get("path")


def _load(file: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        content = parse(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    return content if isinstance(content, dict) else {}


def merge(options: MergeOptions, target: Path, say: Say = logger.info) -> Difference | None:
    """Write the checkpoint's model as a Hugging Face folder (or its adapters as a peft folder) at ``target``.

    What was written is loaded again and compared with what was merged and with the base model before the folder gets
    its name; on any error nothing is left.

    Args:
        say: called with each line of the report.

    Returns:
        How the written model differs from its base; None where that was not asked for.

    Raises:
        ValueError: the checkpoint, the base or the target cannot be used, or nothing differs from the base.
    """
    checkpoint = CheckpointModel(options)
    say(
        f"{checkpoint.folder}: {len(checkpoint.reader.shapes)} tensors in {checkpoint.reader.num_files} files, "
        f"{len(checkpoint.adapters)} LoRA adapters"
    )
    write = _write_adapters if options.lora == "keep" else _write_merged
    with staged_folder(target, checkpoint.bytes_to_write() if options.lora == "merge" else 0) as staging:
        difference = write(checkpoint, staging, say)
        check_tokenizer(staging, options.trust_remote_code)
    say(f"written to {target.expanduser().absolute()}")
    return difference


def _write_merged(checkpoint: CheckpointModel, staging: Path, say: Say) -> Difference | None:
    model = checkpoint.model(checkpoint.dtype)
    write_model(model, checkpoint.description, staging)
    reloaded = load_model(staging, checkpoint.description)
    written = dict(reloaded.named_parameters())
    check = compare(written, dict(model.named_parameters()))
    if not check.none:
        raise ValueError(f"what was written is not what was merged: {check.describe()}; is the disk sound?")
    del model
    check_forward(reloaded, staging)
    say(f"loaded again: all {check.tensors} tensors ({checkpoint.dtype}) are as merged, its outputs are finite")
    if checkpoint.base is None:
        say("not compared with a base model")
        return None
    base = load_base(checkpoint)
    return _told(compare(written, dict(base.named_parameters())), checkpoint, say)


def _write_adapters(checkpoint: CheckpointModel, staging: Path, say: Say) -> Difference | None:
    """A peft folder, read back and, where the base model is there, put onto it."""
    config = _load(checkpoint.folder / "lora_adapter" / "adapter_config.json", json.loads)
    whole = config.get("modules_to_save") or []  # trained whole beside the adapters: a critic's value head
    names = [name for adapter in checkpoint.adapters for name in (adapter.a, adapter.b)]
    names += [name for name in checkpoint.reader.shapes if clean_name(name).split(".")[-2] in whole]
    loaded = checkpoint.reader.load(names)
    dtype = None if checkpoint.options.dtype == "auto" else checkpoint.dtype
    tensors = {
        "base_model.model." + clean_name(name).replace(".default.", "."): tensor.to(dtype or tensor.dtype).contiguous()
        for name, tensor in loaded.items()
    }
    save_file(tensors, staging / _ADAPTER_FILE)
    if checkpoint.base is not None:
        config["base_model_name_or_path"] = str(checkpoint.base)
    (staging / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    copy_tokenizer(checkpoint.description.folder, staging)
    check = compare(load_file(staging / _ADAPTER_FILE), tensors)
    if not check.none:
        raise ValueError(f"what was written is not what was read: {check.describe()}; is the disk sound?")
    say(f"loaded again: all {check.tensors} adapter tensors are as trained")
    if checkpoint.base is not None and not checkpoint.description.is_value_model:
        _check_on_base(checkpoint, staging, say)  # a base model has no value head to start from
    return _told(_adapter_difference(checkpoint), checkpoint, say)


def _check_on_base(checkpoint: CheckpointModel, staging: Path, say: Say) -> None:
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(load_base(checkpoint), staging).eval()
    check_forward(adapted, staging)
    say(f"peft puts it onto {checkpoint.base}, its outputs are finite")


def _adapter_difference(checkpoint: CheckpointModel) -> Difference:
    """What the adapters change in the weights that they sit on, one layer after the other."""
    total = Difference()
    squares = scale = 0.0
    for adapter in checkpoint.adapters:
        tensors = checkpoint.reader.load([adapter.base, adapter.a, adapter.b])
        weight = tensors[adapter.base]
        merged = (weight.float() + adapter.delta(tensors, checkpoint.scale)).to(weight.dtype)
        one = compare({adapter.owner: merged}, {adapter.owner: weight})
        norm = float(weight.float().square().sum(dtype=torch.float64))
        squares, scale = squares + one.relative**2 * norm, scale + norm
        total.tensors += 1
        total.elements += one.elements
        total.changed_elements += one.changed_elements
        total.changed.update(one.changed)
    total.relative = (squares / scale) ** 0.5 if scale else 0.0
    return total


def _told(difference: Difference, checkpoint: CheckpointModel, say: Say) -> Difference:
    """Reports the difference from the base model; raises where there is none."""
    where = checkpoint.base or "the base weights in the checkpoint"
    if not difference.changed and not difference.reshaped:
        raise ValueError(
            f"nothing differs from {where}: {difference.describe()}. The checkpoint is of an untrained model, or what "
            f"it learnt is lost in {checkpoint.dtype} (--dtype fp32 keeps it)"
        )
    say(f"compared with {where}: {difference.describe()}")
    return difference


def load_base(checkpoint: CheckpointModel) -> nn.Module:
    """The base model, in the dtype it is stored in."""
    assert checkpoint.base is not None, "asked for only where there is one"
    description: ModelDescription = describe_model(checkpoint.base, None, checkpoint.options.trust_remote_code)
    return load_model(checkpoint.base, description)


def test(options: MergeOptions, hf_folder: Path, atol: float = 1e-6, say: Say = logger.info) -> Difference:
    """Compare the checkpoint's model with a Hugging Face folder, in the folder's dtype.

    Returns:
        The difference beyond ``atol``: ``none`` is True where names, shapes and values agree.

    Raises:
        ValueError: the checkpoint or the folder cannot be used.
    """
    folder = hf_folder.expanduser()
    if not folder.is_dir():
        raise ValueError(f"--test_hf_dir {folder}: there is no such folder")
    checkpoint = CheckpointModel(options)
    there = load_model(folder, describe_model(folder, options.is_value_model or None, options.trust_remote_code))
    here = checkpoint.model(None)
    difference = compare(dict(there.named_parameters()), dict(here.named_parameters()), atol)
    say(f"{folder} against {checkpoint.folder}: {difference.describe()}")
    return difference
