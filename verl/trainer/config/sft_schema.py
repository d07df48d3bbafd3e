"""The typed form of ``sft_trainer.yaml``, and the rules for its values. Imports neither torch nor ray."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verl.trainer.config.errors import ConfigError
from verl.trainer.config.names import TRACKERS, folder_name_problem
from verl.trainer.config.schema.node import ConfigNode
from verl.trainer.config.validate_files import check_model_path, local_folder
from verl.trainer.config.validate_numbers import at_least, finite, lora_problems

_Dtype = Literal["bf16", "bfloat16", "fp16", "float16", "fp32", "float32"]


@dataclass(frozen=True, kw_only=True)
class SFTDataConfig(ConfigNode):
    """Rows to learn from."""

    train_files: str | list[str] | None
    val_files: str | list[str] | None
    prompt_key: str
    response_key: str
    max_length: int
    truncation: Literal["error", "left", "right"]
    apply_chat_template: bool
    append_eos: bool
    loss_on_prompt: bool
    train_batch_size: int
    max_token_len_per_gpu: int


@dataclass(frozen=True, kw_only=True)
class SFTShardingConfig(ConfigNode):
    """How ranks share the model."""

    fsdp_size: int
    model_dtype: _Dtype | None
    reshard_after_forward: bool


@dataclass(frozen=True, kw_only=True)
class SFTModelConfig(ConfigNode):
    """The model that learns."""

    path: str | None
    tokenizer_path: str | None
    override_config: Mapping[str, Any]
    random_init: bool
    enable_gradient_checkpointing: bool
    trust_remote_code: bool
    torch_compile: bool
    lora_rank: int
    lora_alpha: float
    target_modules: str | list[str]
    fsdp_config: SFTShardingConfig


@dataclass(frozen=True, kw_only=True)
class SFTOptimConfig(ConfigNode):
    """AdamW and its schedule."""

    lr: float
    betas: list[float]
    weight_decay: float
    clip_grad: float
    lr_scheduler: Literal["cosine", "constant"]
    warmup_steps_ratio: float
    min_lr_ratio: float


@dataclass(frozen=True, kw_only=True)
class SFTRunConfig(ConfigNode):
    """How long, how often, and where to."""

    device: Literal["auto", "cpu", "cuda"]
    default_local_dir: str
    project_name: str
    experiment_name: str
    logger: str | list[str]
    total_epochs: int
    total_training_steps: int | None
    seed: int
    log_freq: int
    save_freq: int
    test_freq: int
    max_ckpt_to_keep: int | None
    resume_mode: Literal["auto", "disable"]
    export_dir: str | None
    export_dtype: _Dtype | None

    @property
    def folder(self) -> Path:
        """Where metrics and checkpoints go."""
        return Path(self.default_local_dir).expanduser()


@dataclass(frozen=True, kw_only=True)
class SFTConfig(ConfigNode):
    """``verl.trainer.fsdp_sft_trainer``."""

    data: SFTDataConfig
    model: SFTModelConfig
    optim: SFTOptimConfig
    trainer: SFTRunConfig
    added_keys: list[str]


def check(config: SFTConfig) -> None:
    """Raises ConfigError, one line for each setting that cannot work."""
    if problems := [*_check_values(config), *_check_files(config)]:
        raise ConfigError(*problems)


def _check_values(config: SFTConfig) -> Iterator[str]:
    data, model, optim, run = config.data, config.model, config.optim, config.trainer
    yield from at_least(
        [
            ("data.train_batch_size", data.train_batch_size),
            ("data.max_token_len_per_gpu", data.max_token_len_per_gpu),
            ("trainer.total_epochs", run.total_epochs),
            ("trainer.total_training_steps", run.total_training_steps),
            ("trainer.max_ckpt_to_keep", run.max_ckpt_to_keep),
        ]
    )
    yield from at_least([("data.max_length", data.max_length)], lowest=2)
    yield from at_least(
        [
            ("optim.lr", optim.lr),
            ("optim.weight_decay", optim.weight_decay),
            ("optim.clip_grad", optim.clip_grad),
            ("trainer.seed", run.seed),
        ],
        lowest=0,
    )
    yield from lora_problems("model", model.lora_rank, model.lora_alpha, model.target_modules)
    yield from finite([("optim.lr", optim.lr), ("optim.weight_decay", optim.weight_decay)])
    for key, share in (
        ("optim.warmup_steps_ratio", optim.warmup_steps_ratio),
        ("optim.min_lr_ratio", optim.min_lr_ratio),
    ):
        if not 0 <= share <= 1:
            yield f"{key}={share:g} has to lie in [0, 1]"
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        yield f"optim.betas={optim.betas} has to be two numbers in [0, 1), such as [0.9,0.95]"
    for name in [run.logger] if isinstance(run.logger, str) else run.logger:
        if name not in TRACKERS:
            yield f"trainer.logger has {name!r}; there are {', '.join(TRACKERS)}"
    for key, name in (("trainer.project_name", run.project_name), ("trainer.experiment_name", run.experiment_name)):
        if problem := folder_name_problem(key, name):
            yield problem


def _check_files(config: SFTConfig) -> Iterator[str]:
    """Files and folders that are not set or not there."""
    data, model, run = config.data, config.model, config.trainer
    if not data.train_files:
        yield "data.train_files has to be set"
    for key, files in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        for name in [files] if isinstance(files, str) else files or []:
            if not Path(name).is_file():
                yield f"{key}={name}: there is no such file"
    if model.path:
        yield from check_model_path("model.path", model.path)
    else:
        yield "model.path has to be set"
    tokenizer = local_folder(model.tokenizer_path) if model.tokenizer_path else None
    if tokenizer is not None and not tokenizer.is_dir():
        yield f"model.tokenizer_path={model.tokenizer_path}: there is no folder {tokenizer}; use a folder or a hub name"
    for key, folder in (("trainer.default_local_dir", run.default_local_dir), ("trainer.export_dir", run.export_dir)):
        place = None if folder is None else Path(folder).expanduser().absolute()
        if place is not None and place.is_file():
            yield f"{key}={folder} is a file; use a folder"
        elif place is not None:  # asked now, since the model is written when all is learnt
            above = next(one for one in (place, *place.parents) if one.exists())
            if not above.is_dir() or not os.access(above, os.W_OK):
                yield f"{key}={folder}: {above} is no folder that can be written to; use another one"
    if not run.default_local_dir:
        yield "trainer.default_local_dir is empty; use a folder"
