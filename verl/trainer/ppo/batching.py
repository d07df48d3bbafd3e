"""Laying out the rows of a step over mini-batches and ranks.

One optimiser step consumes one mini-batch. Rows are dealt to mini-batches by a seeded permutation, in as few
mini-batches as ``ppo_mini_batch_size`` allows and of sizes as equal as possible, so that no optimiser step sees a
handful of left-over rows. Inside a mini-batch the rows are dealt to ranks with equal counts and balanced token
sums (Karmarkar-Karp). Rows that do not divide are completed with filler rows of zero weight: their response mask
is empty, so they enter no loss, no statistic and no metric.
"""
from __future__ import annotations

import math

import numpy as np
import torch

from verl.protocol import DataProto
from verl.utils.row_arrays import object_array
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

FILLER_UID = "filler"


def row_lengths(rows: DataProto) -> np.ndarray:
    """Tokens of every row, prompt and response together: int64 ``(rows,)``."""
    return (rows.batch["prompt_length"] + rows.batch["response_mask"].sum(-1)).numpy().astype(np.int64)


def real_rows(rows: DataProto) -> np.ndarray:
    """Indices of the rows that are no filler: int64 ``(real rows,)``."""
    return np.flatnonzero(rows.non_tensor_batch["uid"] != FILLER_UID)


def without_filler(rows: DataProto) -> DataProto:
    """The rows without filler, in their present order (the same object if there is none)."""
    keep = real_rows(rows)
    return rows if len(keep) == len(rows) else rows.select_idxs(keep)


def make_filler(like: DataProto, count: int, pad_token_id: int) -> DataProto:
    """``count`` rows of zero weight with the columns of ``like``."""
    filler = like.select_idxs(np.zeros(count, dtype=np.int64))
    for key, value in filler.batch.items():
        fill = pad_token_id if key == "responses" else 0
        filler.batch[key] = torch.full_like(value, fill)
    filler.batch["prompt_length"] = torch.ones_like(filler.batch["prompt_length"])
    filler.non_tensor_batch["prompt_ids"] = object_array(np.full((count, 1), pad_token_id, dtype=np.int32))
    for key in ("uid", "traj_uid"):
        filler.non_tensor_batch[key] = object_array([FILLER_UID] * count)
    return filler


def arrange_rows(
    rows: DataProto,
    *,
    mini_batch_size: int,
    world_size: int,
    pad_token_id: int,
    seed: int | tuple[int, ...],
    balance: bool = True,
) -> DataProto:
    """Order rows so that ``chunk(world_size)`` hands every rank its equal share of every mini-batch.

    Args:
        rows: N rows, none of them filler.
        mini_batch_size: most rows of one optimiser step, over all ranks.
        world_size: ranks that share the rows.
        pad_token_id: token of filler rows.
        seed: of the permutation that deals rows to mini-batches.
        balance: balance token sums over ranks (``trainer.balance_batch``).

    Returns:
        N + filler rows with ``batch["mini_batch"]`` int64 ``(rows,)``: the optimiser step of each row. Every rank's
        chunk holds the same number of rows of every mini-batch, in mini-batch order.
    """
    count = len(rows)
    if count == 0:
        raise ValueError("the rollout returned no rows: every episode failed; see rollout/infra_failed in the metrics")
    minis = np.array_split(np.random.default_rng(seed).permutation(count), math.ceil(count / mini_batch_size))
    padded_sizes = [math.ceil(len(mini) / world_size) * world_size for mini in minis]
    missing = sum(padded_sizes) - count
    if missing:
        rows = DataProto.concat([rows, make_filler(rows, missing, pad_token_id)])
    lengths = row_lengths(rows)
    by_rank: list[list[int]] = [[] for _ in range(world_size)]
    mini_of_row = np.empty(len(rows), dtype=np.int64)
    next_filler = count
    for number, (mini, size) in enumerate(zip(minis, padded_sizes)):
        members = np.concatenate([mini, np.arange(next_filler, next_filler + size - len(mini))])
        next_filler += size - len(mini)
        mini_of_row[members] = number
        for rank, part in enumerate(_split(lengths[members], world_size, balance)):
            by_rank[rank].extend(int(members[i]) for i in part)
    rows.batch["mini_batch"] = torch.from_numpy(mini_of_row)
    return rows.select_idxs(np.array([i for part in by_rank for i in part], dtype=np.int64))


def concat_rows(parts: list[DataProto]) -> DataProto:
    """One DataProto of several whose responses were padded to different lengths."""
    longest = max(part.batch["responses"].shape[1] for part in parts)
    for part in parts:
        missing = longest - part.batch["responses"].shape[1]
        for key, value in part.batch.items():
            if value.dim() == 2 and missing:
                part.batch[key] = torch.nn.functional.pad(value, (0, missing))
    return DataProto.concat(parts)


def _split(lengths: np.ndarray, parts: int, balance: bool) -> list[list[int]]:
    if parts == 1 or not balance:
        return [list(part) for part in np.array_split(np.arange(len(lengths)), parts)]
    return get_seqlen_balanced_partitions(lengths.tolist(), k_partitions=parts, equal_size=True)


def balance_metrics(natural_lengths: np.ndarray, rows: DataProto, world_size: int) -> dict[str, float]:
    """``global_seqlen/*``: token sums per rank, as the rows came (split in order) and as arranged (balanced)."""
    natural = np.array([part.sum() for part in np.array_split(natural_lengths, world_size)])
    balanced = row_lengths(rows).reshape(world_size, -1).sum(1)
    return {
        "global_seqlen/min": float(natural.min()),
        "global_seqlen/max": float(natural.max()),
        "global_seqlen/minmax_diff": float(natural.max() - natural.min()),
        "global_seqlen/balanced_min": float(balanced.min()),
        "global_seqlen/balanced_max": float(balanced.max()),
        "global_seqlen/mean": float(natural.mean()),
    }
