"""The parquet shell of reinforcement learning: one row a task, a chat in one column, anything else beside it.

In agent training the environment makes the prompts, so a row says little more than "one task". Rows are read from the
Arrow table as they are asked for; videos are passed on as they are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import Dataset

from verl.utils.row_arrays import object_array

logger = logging.getLogger(__name__)

_PREPARE = "examples/data_preprocess/prepare.py writes one"


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor | np.ndarray]:
    """One batch from rows: tensors are stacked, anything else becomes a one-dimensional object array.

    Args:
        data_list: rows with the same keys; tensors of a key have the same shape.
    """
    batch: dict[str, torch.Tensor | np.ndarray] = {}
    for key in data_list[0]:
        values = [row[key] for row in data_list]
        batch[key] = torch.stack(values) if isinstance(values[0], torch.Tensor) else object_array(values)
    return batch


class RLHFDataset(Dataset):
    """Rows of one or more parquet files.

    A row has ``input_ids``, ``attention_mask`` and ``position_ids`` (int64, ``(max_prompt_length,)``, padded on the
    left), ``raw_prompt_ids`` (list of int, unpadded), ``raw_prompt`` (the chat), ``index`` and ``tools_kwargs`` (out of
    ``extra_info``), ``multi_modal_data`` for images when there is a processor, and the remaining columns.

    Args:
        data_files: parquet file or files; remote ones are copied to ``config.cache_dir``.
        tokenizer: tokenizer with a chat template.
        config: the ``data`` node of the configuration.
        processor: image processor; None = text.

    Raises:
        ValueError: a file is missing or no parquet, files differ in their columns, or the chat column is missing.
    """

    def __init__(self, data_files: str | Sequence[str], tokenizer: Any, config: Any, processor: Any = None) -> None:
        self.data_files = [data_files] if isinstance(data_files, str) else list(data_files)
        self.tokenizer = tokenizer
        self.processor = processor
        self.prompt_key = config.prompt_key
        self.image_key = config.image_key
        self.max_prompt_length = config.max_prompt_length
        self.truncation = config.truncation
        self.template_kwargs = dict(config.apply_chat_template_kwargs)
        tables = [_read(_local(name, config.cache_dir, config.use_shm)) for name in self.data_files]
        try:
            self.table = pa.concat_tables(tables)
        except pa.ArrowInvalid as error:
            raise ValueError(f"the files {', '.join(self.data_files)} differ in their columns: {error}") from error
        if self.prompt_key not in self.table.column_names:
            raise ValueError(
                f"{self.data_files[0]} has no column {self.prompt_key!r} (data.prompt_key); it has "
                f"{', '.join(self.table.column_names)}"
            )
        if config.filter_overlong_prompts:
            self._filter_overlong()

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = self._row(item)
        chat = row.pop(self.prompt_key)
        ids = self._truncate(self._prompt_ids(chat), item)
        extra = row.get("extra_info") or {}
        row.update(_left_padded(ids, self.max_prompt_length, self._pad_id()))
        row["raw_prompt_ids"] = ids
        row["raw_prompt"] = chat
        row["index"] = extra.get("index", item)
        row["tools_kwargs"] = extra.get("tools_kwargs", {})
        if self.processor is not None and self.image_key in row:
            row["multi_modal_data"] = {"image": [_image(one) for one in row.pop(self.image_key)]}
        return row

    def _row(self, item: int) -> dict[str, Any]:
        return dict(self.table.slice(range(len(self))[item], 1).to_pylist()[0])

    def _prompt_ids(self, chat: Sequence[Mapping[str, Any]]) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            list(chat), add_generation_prompt=True, tokenize=False, **self.template_kwargs
        )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _truncate(self, ids: list[int], item: int) -> list[int]:
        """``data.truncation`` on a prompt; the shell has no history, so ``shorten_history`` keeps the end."""
        limit = self.max_prompt_length
        if len(ids) <= limit:
            return ids
        if self.truncation == "error":
            raise ValueError(
                f"row {item} of {', '.join(self.data_files)} has a prompt of {len(ids)} tokens, more than "
                f"data.max_prompt_length={limit}; raise it, or use data.filter_overlong_prompts=true or "
                "data.truncation=left"
            )
        if self.truncation == "right":
            return ids[:limit]
        if self.truncation == "middle":
            head = limit // 2
            return ids[:head] + ids[len(ids) - (limit - head) :]
        return ids[-limit:]

    def _filter_overlong(self) -> None:
        chats = self.table.column(self.prompt_key).to_pylist()
        keep = [len(self._prompt_ids(chat)) <= self.max_prompt_length for chat in chats]
        if not all(keep):
            logger.warning(
                "left out %d of %d rows whose prompt exceeds data.max_prompt_length=%d",
                keep.count(False),
                len(keep),
                self.max_prompt_length,
            )
            self.table = self.table.filter(pa.array(keep))

    def _pad_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        return int(pad if pad is not None else self.tokenizer.eos_token_id)


def _left_padded(ids: Sequence[int], length: int, pad_id: int) -> dict[str, torch.Tensor]:
    missing = length - len(ids)
    mask = torch.tensor([0] * missing + [1] * len(ids), dtype=torch.int64)
    return {
        "input_ids": torch.tensor([pad_id] * missing + list(ids), dtype=torch.int64),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(0) - 1).clamp(min=0),
    }


def _local(name: str, cache_dir: str, use_shm: bool) -> Path:
    """A file on this machine; remote ones are copied to the cache folder first."""
    if "://" not in name and not use_shm:
        return Path(name).expanduser()
    from verl.utils.fs import copy_to_local

    return Path(
        copy_to_local(name, cache_dir=os.path.expanduser(cache_dir), use_shm=use_shm, key="data file", hub=False)
    )


def _read(path: Path) -> pa.Table:
    if not path.is_file():
        raise ValueError(f"there is no parquet file {path} (data.train_files, data.val_files); {_PREPARE}")
    try:
        return pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is no readable parquet file ({reason}); {_PREPARE}") from error


def _image(value: Any) -> Any:
    """A PIL image from a parquet value ``{bytes, path}``; anything else as it is."""
    if not isinstance(value, Mapping):
        return value
    import io

    from PIL import Image

    source = io.BytesIO(value["bytes"]) if value.get("bytes") else value["path"]
    return Image.open(source).convert("RGB")
