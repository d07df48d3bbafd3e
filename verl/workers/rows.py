"""Rows of a DataProto as ragged arrays, ready to be packed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from verl.models.packing import PackedRows, pack_rows
from verl.protocol import DataProto

_FILLER = np.zeros(2, dtype=np.int32)  # not 1: torch.compile makes a graph of its own for a size of 1
_NOTHING = np.zeros(0, dtype=np.int32)


class RaggedRows:
    """The token ids of ``N`` rows at their true lengths.

    Reads ``prompt_ids``, or, in the padded form (left-padded ``input_ids`` of width P + R with ``attention_mask``), the
    unpadded prompt from there. A response reaches to the last set position of ``response_mask`` (or of the
    attention mask where there is no response mask).

    Attributes:
        prompts, responses: N int arrays each.
        lengths: (N,) int64, prompt + response.
        mask: (N, R) float32, the response mask.
        width: R, the padded width of response tensors.
    """

    def __init__(self, data: DataProto) -> None:
        responses = data.batch["responses"].numpy()
        self.width = responses.shape[1]
        self.mask = response_mask_of(data)
        positions = np.arange(1, self.width + 1)
        response_lengths = ((self.mask.numpy() > 0) * positions).max(axis=1, initial=0)
        self.responses = [row[:length] for row, length in zip(responses, response_lengths)]
        self.prompts = _prompts_of(data, self.width)
        self.lengths = np.array([len(p) for p in self.prompts], dtype=np.int64) + response_lengths

    def __len__(self) -> int:
        return len(self.prompts)

    def pack(self, indices: Sequence[int], device: torch.device | str) -> PackedRows:
        """Pack some rows; no rows at all give a filler that counts nowhere."""
        if not len(indices):
            return pack_rows([_FILLER], [_NOTHING], device)
        return pack_rows([self.prompts[i] for i in indices], [self.responses[i] for i in indices], device)


def response_mask_of(data: DataProto) -> torch.Tensor:
    """``response_mask`` as float32 ``(N, R)``, from the tail of the attention mask if the rows carry none."""
    if "response_mask" in data.batch.keys():
        return data.batch["response_mask"].float()
    width = data.batch["responses"].shape[1]
    return data.batch["attention_mask"][:, -width:].float()


def _prompts_of(data: DataProto, response_width: int) -> list[np.ndarray]:
    if "prompt_ids" in data.non_tensor_batch:
        return list(data.non_tensor_batch["prompt_ids"])
    ids = data.batch["input_ids"][:, :-response_width].numpy()
    mask = data.batch["attention_mask"][:, :-response_width].numpy().astype(bool)
    return [row[keep] for row, keep in zip(ids, mask)]
