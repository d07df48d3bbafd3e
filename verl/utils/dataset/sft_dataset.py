"""Rows for supervised fine-tuning: a prompt, and the response the model is to learn after it.

Files are parquet, or JSON lines. A column may hold strings or lists of token ids; lists are used exactly as they are,
strings are tokenised here. A multi-turn episode is several rows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

ROWS_PER_ENCODING = 4096
TRUNCATION = ("error", "left", "right")


class SFTDataset:
    """All rows as int32 arrays in memory.

    Args:
        files: one path or several.
        tokenizer: needed for string columns only.
        prompt_key, response_key: column names.
        max_length: most tokens of prompt and response together.
        truncation: what happens to longer rows: ``error``; ``left`` cuts the prompt's start; ``right`` cuts the
            response's end. At least one prompt token stays.
        apply_chat_template: string prompts become one user turn of the tokenizer's chat template.
        append_eos: string responses end with the tokenizer's end-of-sequence token.
        loss_on_prompt: learn the prompt's tokens too, all but the first (language modelling).

    Attributes:
        lengths: int64 ``(rows,)``, tokens of prompt and response together.
        largest_id: of all tokens.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: Any | None = None,
        prompt_key: str = "prompt",
        response_key: str = "response",
        max_length: int = 1024,
        truncation: str = "error",
        apply_chat_template: bool = False,
        append_eos: bool = True,
        loss_on_prompt: bool = False,
    ) -> None:
        if truncation not in TRUNCATION:
            raise ValueError(f"data.truncation={truncation!r}: use one of {TRUNCATION}")
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.truncation = truncation
        self.apply_chat_template = apply_chat_template
        self.append_eos = append_eos
        self.loss_on_prompt = loss_on_prompt
        self.prompts: list[np.ndarray] = []
        self.responses: list[np.ndarray] = []
        self.largest_id = 0
        for path in [files] if isinstance(files, str) else files:
            prompts, responses = read_columns(path, (prompt_key, response_key))
            for first in range(0, len(prompts), ROWS_PER_ENCODING):
                part = slice(first, first + ROWS_PER_ENCODING)
                encoded = self._encode_prompts(prompts[part]), self._encode_responses(responses[part])
                for prompt, response in zip(*encoded, strict=True):
                    self._add(prompt, response)
        if not self.prompts:
            raise ValueError(f"no rows in {files}: check data.train_files")
        lengths = [len(p) + len(r) for p, r in zip(self.prompts, self.responses)]
        self.lengths = np.array(lengths, dtype=np.int64)
        logger.info(
            "%d rows, %d tokens, %d of them learnt", len(self), self.lengths.sum(), sum(map(len, self.responses))
        )

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """``(prompt ids, response ids)``."""
        return self.prompts[index], self.responses[index]

    def _encode_prompts(self, prompts: list[Any]) -> list[np.ndarray]:
        if not isinstance(prompts[0], str):
            return [np.asarray(prompt, dtype=np.int32) for prompt in prompts]
        if self.apply_chat_template:
            chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
            prompts = self._tokenizer().apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        return self._encode(prompts)

    def _encode_responses(self, responses: list[Any]) -> list[np.ndarray]:
        if not isinstance(responses[0], str):
            return [np.asarray(response, dtype=np.int32) for response in responses]
        end = [self._tokenizer().eos_token_id] if self.append_eos else []
        return [np.append(ids, end).astype(np.int32) for ids in self._encode(responses)]

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids of many texts; a fast tokenizer encodes them on all cores."""
        encoded = self._tokenizer()(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return [np.asarray(ids, dtype=np.int32) for ids in encoded]

    def _tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ValueError("rows with text need a tokenizer: set model.tokenizer_path, or give lists of token ids")
        return self.tokenizer

    def _add(self, prompt: np.ndarray, response: np.ndarray) -> None:
        row = len(self.prompts)
        if len(prompt) == 0 or len(response) == 0:
            raise ValueError(f"row {row} has an empty prompt or response")
        lowest, highest = min(prompt.min(), response.min()), max(prompt.max(), response.max())
        if lowest < 0:
            raise ValueError(f"row {row} has the token id {lowest}; ids count from 0")
        self.largest_id = max(self.largest_id, int(highest))
        excess = len(prompt) + len(response) - self.max_length
        if excess > 0:
            if self.truncation == "error":
                raise ValueError(
                    f"row {row} has {excess + self.max_length} tokens: raise data.max_length above {self.max_length}, "
                    "or set data.truncation to left or right"
                )
            if self.truncation == "left":
                prompt = prompt[min(excess, len(prompt) - 1) :]
            response = response[: self.max_length - len(prompt)]
            if len(response) == 0:
                raise ValueError(f"row {row}: the prompt alone fills data.max_length={self.max_length}")
        if self.loss_on_prompt:
            prompt, response = prompt[:1], np.concatenate([prompt[1:], response])
        self.prompts.append(prompt)
        self.responses.append(response)


def read_columns(path: str, columns: Sequence[str]) -> list[list[Any]]:
    """Columns of a parquet or JSON-lines file, one list per column: of texts, or of rows of token ids.

    Raises:
        ValueError: missing file or column, or a file, a line or a value that is not of that kind.
    """
    if not Path(path).is_file():
        raise ValueError(f"data file {path} does not exist: check data.train_files and data.val_files")
    if Path(path).suffix in (".jsonl", ".json"):
        rows = _json_rows(path)
        names = set(rows[0]) if rows else set(columns)
        table = {name: [row.get(name) for row in rows] for name in columns if name in names}
    else:
        import pyarrow.parquet as pq

        try:
            names = set(pq.read_schema(path).names)
            table = {name: _values(pq.read_table(path, columns=[name])[name]) for name in columns if name in names}
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is no readable parquet file ({str(error).splitlines()[0]})") from error
    missing = [name for name in columns if name not in table]
    if missing:
        raise ValueError(
            f"{path} has no column {missing}: set data.prompt_key and data.response_key to two of {sorted(names)}"
        )
    for name, values in table.items():
        _check_column(path, name, values)
    return [table[name] for name in columns]


def _json_rows(path: str) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is no JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number} is no JSON object, but {line.strip()[:50]}")
        rows.append(row)
    return rows


def _check_column(path: str, name: str, values: list[Any]) -> None:
    """Raises ValueError where a value is of another kind than the first: text, or token ids."""
    texts = bool(values) and isinstance(values[0], str)
    for row, value in enumerate(values):
        if isinstance(value, str) and texts:
            continue
        sequence = isinstance(value, (list, np.ndarray)) and not texts
        if not sequence or (len(value) and np.asarray(value).dtype.kind not in "iu") or np.ndim(value) != 1:
            wanted = "text, as in the first row" if texts else "a list of token ids"
            raise ValueError(f"{path}: {name} of row {row} is {str(value)[:50]!r}, not {wanted}")


def _values(column: Any) -> list[Any]:
    """A parquet column as python strings or numpy arrays (lists are not boxed element by element)."""
    if "list" not in str(column.type):
        return column.to_pylist()
    values = []
    for chunk in column.chunks:
        flat = chunk.flatten().to_numpy(zero_copy_only=False)
        offsets = np.concatenate([[0], np.cumsum(chunk.value_lengths().to_numpy(zero_copy_only=False))])
        values.extend(flat[a:b] for a, b in zip(offsets[:-1].astype(int), offsets[1:].astype(int)))
    return values
