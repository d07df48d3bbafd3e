"""The typed form of ``sft_trainer.yaml``. Defaults live in the YAML alone; imports neither torch nor ray."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.trainer.config.names import folder_name_problem
from verl.trainer.config.validate_files import check_model_path, local_folder


@dataclass(frozen=True)
class SFTDataConfig:
    train_files: Any
    val_files: Any
    prompt_key: str
    response_key: str
    max_length: int
    truncation: str
    apply_chat_template: bool
    append_eos: bool
    loss_on_prompt: bool
    train_batch_size: int
    max_token_len_per_gpu: int


@dataclass(frozen=True)
class SFTShardingConfig:
    fsdp_size: int
    model_dtype: str | None
    reshard_after_forward: bool


@dataclass(frozen=True)
class SFTModelConfig:
    path: str
    tokenizer_path: str | None
    override_config: dict[str, Any]
    random_init: bool
    enable_gradient_checkpointing: bool
    trust_remote_code: bool
    torch_compile: bool
    lora_rank: int
    lora_alpha: float
    target_modules: Any
    fsdp_config: SFTShardingConfig


@dataclass(frozen=True)
class SFTOptimConfig:
    lr: float
    betas: list[float]
    weight_decay: float
    clip_grad: float
    lr_scheduler: str
    warmup_steps_ratio: float
    min_lr_ratio: float


@dataclass(frozen=True)
class SFTRunConfig:
    device: str
    default_local_dir: str
    project_name: str
    experiment_name: str
    logger: list[str]
    total_epochs: int
    total_training_steps: int | None
    seed: int
    log_freq: int
    save_freq: int
    test_freq: int
    max_ckpt_to_keep: int | None
    resume_mode: str
    export_dir: str | None
    export_dtype: str | None


@dataclass(frozen=True)
class SFTConfig:
    data: SFTDataConfig
    model: SFTModelConfig
    optim: SFTOptimConfig
    trainer: SFTRunConfig


def sft_config(tree: dict[str, Any]) -> SFTConfig:
    """The composed, resolved YAML tree as ``SFTConfig``.

    Raises:
        ValueError: an unknown or missing key, or a value outside its choices; the message names the key.
    """
    config = SFTConfig(
        data=_section(SFTDataConfig, tree, "data"),
        model=_section(
            SFTModelConfig,
            {
                "model": {
                    **tree["model"],
                    "fsdp_config": _section(SFTShardingConfig, tree["model"], "fsdp_config"),
                }
            },
            "model",
        ),
        optim=_section(SFTOptimConfig, tree, "optim"),
        trainer=_section(SFTRunConfig, tree, "trainer"),
    )
    _check_choice("optim.lr_scheduler", config.optim.lr_scheduler, ("cosine", "constant"))
    _check_choice("trainer.device", config.trainer.device, ("auto", "cpu", "cuda"))
    _check_choice("trainer.resume_mode", config.trainer.resume_mode, ("auto", "disable"))
    names = ("project_name", config.trainer.project_name), ("experiment_name", config.trainer.experiment_name)
    for key, name in names:
        if problem := folder_name_problem(f"trainer.{key}", name):
            raise ValueError(problem)
    if config.data.train_batch_size <= 0:
        raise ValueError("data.train_batch_size must be positive")
    return config


def check_files(config: SFTConfig) -> Iterator[str]:
    """Files and folders of the configuration that are not there, one line each."""
    data, model, folder = config.data, config.model, config.trainer.default_local_dir
    for key, files in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        for name in [files] if isinstance(files, str) else files or []:
            if not Path(name).is_file():
                yield f"{key}={name}: there is no such file"
    yield from check_model_path("model.path", model.path)
    tokenizer = local_folder(model.tokenizer_path) if model.tokenizer_path else None
    if tokenizer is not None and not tokenizer.is_dir():
        yield f"model.tokenizer_path={model.tokenizer_path}: there is no folder {tokenizer}; use a folder or a hub name"
    if Path(folder).expanduser().is_file():
        yield f"trainer.default_local_dir={folder} is a file; use a folder"


def _section(kind: type, tree: dict[str, Any], name: str) -> Any:
    try:
        return kind(**tree[name])
    except TypeError as error:
        raise ValueError(f"section {name} of the SFT config does not fit: {error}") from None


def _check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{key}={value!r}: use one of {', '.join(choices)}")
