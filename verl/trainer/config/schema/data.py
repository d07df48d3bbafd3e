"""``data``: the parquet shell and the lengths of prompts and responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from verl.trainer.config.schema.node import ConfigNode

Truncation = Literal["left", "right", "middle", "error", "shorten_history"]


@dataclass(frozen=True, kw_only=True)
class CustomClsConfig(ConfigNode):
    """A dataset class of the user's own."""

    path: str | None
    name: str | None


@dataclass(frozen=True, kw_only=True)
class DataConfig(ConfigNode):
    """Rows read per step and the token limits of one agent step."""

    tokenizer: str | None
    use_shm: bool
    train_files: str | list[str]
    val_files: str | list[str]
    prompt_key: str
    reward_fn_key: str
    max_prompt_length: int
    max_response_length: int
    train_batch_size: int
    val_batch_size: int | None
    gen_batch_size: int | None
    seed: int
    dataloader_num_workers: int
    cache_dir: str
    return_raw_input_ids: bool
    return_raw_chat: bool
    return_full_prompt: bool
    need_tools_kwargs: bool
    shuffle: bool
    filter_overlong_prompts: bool
    filter_overlong_prompts_workers: int
    filter_prompts: bool
    truncation: Truncation
    image_key: str
    video_key: str
    chat_template_func: str | None
    apply_chat_template_kwargs: Mapping[str, Any]
    trust_remote_code: bool
    custom_cls: CustomClsConfig
