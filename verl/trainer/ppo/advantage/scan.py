"""Sums from each token to the end of its response, without a loop over time.

``S_t = x_t + c S_{t+1}`` is added up by doubling: after the k-th round every position holds the sum of its next 2^k
terms, so a response of R tokens takes log2(R) rounds. Rows go through in blocks that stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_BLOCK_ROWS = 512
_NOTHING = 1e-40  # a factor below it adds nothing, in float32 or float64


def row_blocks(rows: int) -> Iterator[slice]:
    """Slices of neighbouring rows that cover all of them."""
    return (slice(start, start + _BLOCK_ROWS) for start in range(0, rows, _BLOCK_ROWS))


def suffix_sums(values: torch.Tensor, factor: float) -> torch.Tensor:
    """``S_t = values_t + factor * S_{t+1}`` along the last dimension of (rows, length), nothing after the last."""
    sums, shift = values.clone(), 1
    while shift < sums.shape[-1] and factor > _NOTHING:
        sums[:, :-shift] += factor * sums[:, shift:]
        factor, shift = factor * factor, 2 * shift
    return sums


class ValidFirst:
    """Moves the valid tokens of each row to its front, in order, and back; the rest is 0.

    Args:
        valid: (rows, length) bool. Where valid tokens come first already, as in training, nothing moves.
    """

    def __init__(self, valid: torch.Tensor) -> None:
        self._valid = valid
        self._places: torch.Tensor | None = None
        if bool((valid[:, 1:] > valid[:, :-1]).any()):
            self._places = torch.where(valid, valid.cumsum(dim=-1) - 1, valid.shape[-1])

    def front(self, values: torch.Tensor) -> torch.Tensor:
        """(rows, length): the valid tokens, then zeros."""
        kept = torch.where(self._valid, values, 0.0)
        if self._places is None:
            return kept
        room = kept.new_zeros(len(kept), kept.shape[-1] + 1)  # masked tokens land in the last column
        return room.scatter_(1, self._places, kept)[:, :-1]

    def back(self, values: torch.Tensor) -> torch.Tensor:
        """(rows, length): every valid token where it was, 0 at masked positions."""
        if self._places is not None:
            values = torch.nn.functional.pad(values, (0, 1)).gather(1, self._places)
        return torch.where(self._valid, values, 0.0)
