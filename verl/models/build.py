"""From a model folder to a sharded, loaded model.

Every rank builds the same skeleton with parameters on the meta device; rank 0 alone reads (or draws) real weights and
scatters them parameter by parameter, so host memory holds one copy of the model per job, not one per rank.

A folder with only ``config.json`` has no weights to read: then the weights are random, which is said once as a warning.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils import logging as transformers_logging

from verl.models.attention import register_packed_attention
from verl.models.heads import VALUE_HEAD, install_log_prob_head, install_value_head
from verl.models.logprobs import enable_compiled_head
from verl.models.lora import LoraSettings, add_lora
from verl.utils.fsdp_utils import (
    ShardingOptions,
    copy_shards,
    count_parameters,
    materialize,
    scatter_weights,
    shard_model,
)
from verl.utils.model import update_model_config

logger = logging.getLogger(__name__)

_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", "*.safetensors.index.json", "pytorch_model*.bin.index.json")
_SAFETENSORS_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True)
class ModelSpec:
    """What to build.

    Attributes:
        path: folder with ``config.json`` and, unless the weights are to be random, weight files.
        kind: ``"causal_lm"``, ``"value"`` (one number per position) or ``"reward"`` (the same, trained already: the
            folder must hold the head as well; of token or sequence classification, as its config says).
        dtype: dtype of the stored parameters.
        override_config: values set on the transformers config, nested like it.
        random_init: draw the weights even if the folder has some.
        seed: seed of random weights (also of a fresh value head).
        gradient_checkpointing: recompute each decoder layer in the backward pass.
        trust_remote_code: let transformers run code from the folder.
        lora: adapter settings; None trains all weights.
    """

    path: str
    kind: str = "causal_lm"
    dtype: torch.dtype = torch.float32
    override_config: Mapping[str, Any] = field(default_factory=dict)
    random_init: bool = False
    seed: int = 0
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    lora: LoraSettings | None = None


def has_weights(path: str) -> bool:
    """Whether a local model folder holds weight files, or an index of some, which may not all have been copied."""
    return any(any(Path(path).glob(pattern)) for pattern in _WEIGHT_FILES)


def stored_dtype(path: str) -> torch.dtype | None:
    """The dtype of all weights in a model's safetensors files; None where they differ, are others or there are none.

    It need not be the one that ``config.json`` names. Files that are not read, such as an adapter's, those of another
    variant, or what is left of an earlier model, say nothing of it.
    """
    found = set()
    for file in _safetensors_to_read(Path(path)):
        with safe_open(file, framework="pt") as weights:
            found |= {weights.get_slice(name).get_dtype() for name in weights.keys()}
    return _SAFETENSORS_DTYPES.get(found.pop()) if len(found) == 1 else None


def _safetensors_to_read(folder: Path) -> set[Path]:
    """What transformers reads the weights of a folder from: one file, else all that an index names."""
    whole, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
    if whole.is_file():
        return {whole}
    if not index.is_file():
        return set()
    return {folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}


def _narrower(wanted: torch.dtype, stored: torch.dtype | None) -> torch.dtype:
    """``stored`` where it takes fewer bytes, and so is exact in ``wanted``."""
    return stored if stored is not None and stored.itemsize < wanted.itemsize else wanted


def load_config(spec: ModelSpec) -> PretrainedConfig:
    """The transformers config of a spec, overrides applied, packed attention chosen."""
    if not (Path(spec.path) / "config.json").is_file():
        raise ValueError(f"no config.json in {spec.path!r}: model.path must be a local Hugging Face model folder")
    config = AutoConfig.from_pretrained(spec.path, trust_remote_code=spec.trust_remote_code)
    update_model_config(config, dict(spec.override_config))
    config.use_cache = False
    if spec.kind in ("value", "reward"):
        config.num_labels = 1
        config.classifier_dropout = 0.0
    return config


def _auto_class(spec: ModelSpec, config: PretrainedConfig) -> type:
    assert spec.kind in ("causal_lm", "value", "reward"), f"unknown model kind {spec.kind!r}"
    if spec.kind == "causal_lm":
        return AutoModelForCausalLM
    architectures = config.architectures or []
    if spec.kind == "reward" and any(name.endswith("ForSequenceClassification") for name in architectures):
        return AutoModelForSequenceClassification
    return AutoModelForTokenClassification


def _build_skeleton(spec: ModelSpec, config: PretrainedConfig) -> nn.Module:
    """The model with meta parameters and real buffers (rotary tables are computed, never loaded)."""
    with init_empty_weights(include_buffers=False):
        model = _auto_class(spec, config).from_config(
            config,
            dtype=spec.dtype,
            attn_implementation=register_packed_attention(),
            trust_remote_code=spec.trust_remote_code,
        )
    model.tie_weights()
    return model


def _build_source(spec: ModelSpec, config: PretrainedConfig, device: torch.device) -> nn.Module:
    """The full model with real weights (rank 0 only)."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(spec.seed)
        if spec.random_init or not has_weights(spec.path):
            logger.warning("random weights for %s: %s", spec.path, _why_random(spec))
            with device:
                model = _auto_class(spec, config).from_config(
                    config, dtype=spec.dtype, trust_remote_code=spec.trust_remote_code
                )
        else:
            if (Path(spec.path) / "adapter_config.json").is_file():
                raise ValueError(
                    f"model.path={spec.path} holds a LoRA adapter (adapter_config.json): merge it into its model "
                    "first, or, if the model is there too, move the adapter elsewhere"
                )
            try:
                with _without_load_report(spec.kind == "value"):
                    model, loaded = _auto_class(spec, config).from_pretrained(
                        spec.path,
                        config=config,
                        dtype=_narrower(spec.dtype, stored_dtype(spec.path)),  # widened on the device
                        trust_remote_code=spec.trust_remote_code,
                        output_loading_info=True,
                    )
            except (OSError, SafetensorError, json.JSONDecodeError) as error:
                raise ValueError(
                    f"the weights in {spec.path} cannot be read ({type(error).__name__}: {error}): model.path has to "
                    "be a whole Hugging Face model folder; copy or download it again"
                ) from error
            _refuse_random_parts(model, loaded["missing_keys"], spec.path)
            untrained = [key for key in loaded["missing_keys"] if key.startswith(f"{VALUE_HEAD}.weight")]
            if spec.kind == "reward" and untrained:
                raise ValueError(
                    f"the folder {spec.path} holds no {untrained[0]}, so its scores would be random: "
                    "reward_model.model.path has to be a trained reward model"
                )
        if spec.lora is not None:
            add_lora(model, spec.lora)
    return model


def _refuse_random_parts(model: nn.Module, missing: Iterable[str], path: str) -> None:
    """ValueError where weights of a model other than a new head are not in its folder and were drawn instead."""
    parameters = {name for name, _ in model.named_parameters() if not name.startswith(f"{VALUE_HEAD}.")}
    if lacking := sorted(parameters.intersection(missing)):
        raise ValueError(
            f"the files in {path} lack {len(lacking)} of the model's weights, such as {lacking[0]}, which would be "
            "random: model.path has to be a whole Hugging Face model folder that fits its config.json"
        )


@contextlib.contextmanager
def _without_load_report(quiet: bool) -> Iterator[None]:
    """Keep transformers from reporting weights that are not in the files, where a new head is what is wanted."""
    verbosity = transformers_logging.get_verbosity()
    if quiet:
        transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def _why_random(spec: ModelSpec) -> str:
    return "asked for by the config" if spec.random_init else "the folder holds a config but no weight files"


def build_model(
    spec: ModelSpec, mesh: DeviceMesh, options: ShardingOptions, like: nn.Module | None = None
) -> nn.Module:
    """Build, shard and load a model; returns it in training mode with its packed head installed. Collective.

    Args:
        like: a model of the same folder and shape on the same mesh, as it was loaded: its shards are copied, and no
            weights are read.

    Raises:
        ValueError: the folder or its config cannot be used; the message names the key.
    """
    device = torch.device(mesh.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    config = load_config(spec)
    model = _build_skeleton(spec, config)
    if spec.lora is not None:
        with init_empty_weights(include_buffers=False):
            add_lora(model, spec.lora)
    if spec.kind in ("value", "reward"):
        install_value_head(model)
    else:
        install_log_prob_head(model)
        if options.compile_layers:
            enable_compiled_head()
    if spec.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    shard_model(model, mesh, options)
    materialize(model, torch.device("cpu") if options.cpu_offload else device)
    if like is not None:
        copy_shards(model, like)
    else:
        source = None
        if dist.get_rank() == 0:
            source = dict(_build_source(spec, config, device).named_parameters())
        scatter_weights(model, source, device)
    model.train()
    if dist.get_rank() == 0 and like is None:
        logger.info("%s: %.1f M parameters, %s", type(model).__name__, count_parameters(model) / 1e6, spec.path)
    return model
