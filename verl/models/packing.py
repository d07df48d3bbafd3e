"""Rows packed into one flat token sequence.

A micro-batch of rows is laid out back to back, without padding, as one sequence of shape ``(1, T)``. Position ids
restart at every row, and attention never crosses a row border (``verl.models.attention``).

Two rows, prompts ``[a b]`` and ``[c]``, responses ``[x y]`` and ``[z]``::

    input_ids      a  b  x  y  c  z
    position_ids   0  1  2  3  0  1
    cu_seqlens     0           4     6
    predict_index     1  2     4            position whose hidden state predicts a response token
    labels            x  y     z            the response token predicted there
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class PackedRows:
    """One micro-batch of ``B`` rows with ``T`` tokens, of which ``M`` are response tokens.

    ``token_row`` and ``token_column`` say where response token ``m`` belongs in a ``(B, R)`` matrix.
    """

    input_ids: torch.Tensor  # (1, T) int64
    position_ids: torch.Tensor  # (1, T) int64
    cu_seqlens: torch.Tensor  # (B + 1,) int32
    row_lengths: tuple[int, ...]  # B python ints, prompt + response
    predict_index: torch.Tensor  # (M,) int64
    labels: torch.Tensor  # (M,) int64
    token_row: torch.Tensor  # (M,) int64
    token_column: torch.Tensor  # (M,) int64

    @property
    def num_rows(self) -> int:
        return len(self.row_lengths)

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[1])

    def model_inputs(self, has_kernel: bool | None = None) -> dict[str, Any]:
        """Keyword arguments of a packed transformers forward.

        The names are those transformers uses for variable-length attention; ``row_lengths`` serves the row loop that
        stands in where no variable-length kernel exists.

        Args:
            has_kernel: whether one exists; None means on CUDA.
        """
        inputs: dict[str, Any] = {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "use_cache": False,
            "cu_seq_lens_q": self.cu_seqlens,
            "cu_seq_lens_k": self.cu_seqlens,
        }
        if has_kernel if has_kernel is not None else self.input_ids.device.type == "cuda":
            # As the size of an empty tensor: a compiled graph has sizes for variables, but numbers for constants.
            inputs["row_bound"] = self.cu_seqlens.new_empty(-(-max(self.row_lengths) // 256) * 256, 0)
        else:
            inputs["row_lengths"] = self.row_lengths
        return inputs

    def gather_response(self, matrix: torch.Tensor) -> torch.Tensor:
        """Pick the response tokens out of a ``(B, R)`` matrix: returns ``(M,)``."""
        return matrix[self.token_row, self.token_column]

    def scatter_response(self, flat: torch.Tensor, width: int) -> torch.Tensor:
        """Lay ``(M,)`` values out as ``(B, width)`` float32, zero where a row has no token. Differentiable."""
        padded = torch.zeros(self.num_rows, width, dtype=torch.float32, device=flat.device)
        return padded.index_put((self.token_row, self.token_column), flat.float())


def pack_rows(
    prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], device: torch.device | str = "cpu"
) -> PackedRows:
    """Pack rows of token ids.

    Args:
        prompts: one int array per row, at least one token each (the first response token needs a predecessor).
        responses: one int array per row, true length, possibly empty.
        device: where the tensors go; one copy per tensor, asynchronous on CUDA.
    """
    assert len(prompts) == len(responses) and len(prompts) > 0, "a micro-batch has at least one row"
    prompt_lengths = np.fromiter((len(p) for p in prompts), np.int64, len(prompts))
    response_lengths = np.fromiter((len(r) for r in responses), np.int64, len(responses))
    assert prompt_lengths.min() > 0, "every row needs at least one prompt token"
    lengths = prompt_lengths + response_lengths
    starts = np.concatenate([[0], np.cumsum(lengths)])
    pieces = [piece for row in zip(prompts, responses) for piece in row]
    tokens = np.concatenate(pieces).astype(np.int64, copy=False)
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)

    token_row = np.repeat(np.arange(len(lengths)), response_lengths)
    response_starts = np.concatenate([[0], np.cumsum(response_lengths)])
    token_column = np.arange(response_starts[-1]) - np.repeat(response_starts[:-1], response_lengths)
    label_index = starts[token_row] + prompt_lengths[token_row] + token_column

    def put(array: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
        if torch.device(device).type == "cuda":
            return tensor.pin_memory().to(device, non_blocking=True)
        return tensor

    return PackedRows(
        input_ids=put(tokens)[None],
        position_ids=put(positions)[None],
        cu_seqlens=put(starts, torch.int32),
        row_lengths=tuple(lengths.tolist()),
        predict_index=put(label_index - 1),
        labels=put(tokens[label_index]),
        token_row=put(token_row),
        token_column=put(token_column),
    )
