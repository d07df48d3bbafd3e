"""What actor and critic share: mini-batches, micro-batches in lockstep, exact metrics.

All ranks run the same number of micro-batches, because FSDP gathers parameters in each: a rank that has fewer runs
empty ones. Nothing here depends on how rows are cut: losses are normalised by counts of the whole mini-batch, and
metrics travel as sums and counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from verl.models.activation_memory import ActivationMemory
from verl.models.micro_batches import split_by_rows, split_by_tokens, split_evenly
from verl.models.packing import PackedRows
from verl.protocol import DataProto
from verl.workers.rows import RaggedRows


@dataclass(frozen=True)
class MicroBatchPlan:
    """How many rows go through the model at once: up to ``max_tokens`` tokens (dynamic), or ``rows`` rows."""

    use_dynamic_bsz: bool
    max_tokens: int
    rows: int | None
    key: str  # config section named in errors

    @classmethod
    def of_section(
        cls, section: Any, prefix: str, key: str, dynamic: str | None = None
    ) -> MicroBatchPlan:
        """The plan of a config section.

        Args:
            section: holds ``{prefix}micro_batch_size_per_gpu``, ``{prefix}micro_batch_size`` (rows over all ranks) and
                ``{prefix}max_token_len_per_gpu``.
            prefix: ``ppo_``, ``log_prob_`` or ``forward_``.
            key: the section's place in the config, for errors.
            dynamic: name of the switch between the two; None means ``{prefix}use_dynamic_bsz``.
        """
        rows = getattr(section, f"{prefix}micro_batch_size_per_gpu")
        all_ranks = getattr(section, f"{prefix}micro_batch_size")
        if rows is None and all_ranks is not None:
            rows = max(1, all_ranks // dist.get_world_size())
        return cls(
            getattr(section, dynamic or f"{prefix}use_dynamic_bsz"),
            getattr(section, f"{prefix}max_token_len_per_gpu"),
            rows,
            f"{key}.{prefix}",
        )

    def split(self, lengths: np.ndarray) -> list[list[int]]:
        """Positions in ``lengths``, in groups."""
        if self.use_dynamic_bsz:
            return split_by_tokens(lengths.tolist(), self.max_tokens)
        if self.rows is None:
            raise ValueError(f"set {self.key}micro_batch_size_per_gpu, or use_dynamic_bsz=True to fill by tokens")
        return split_evenly(lengths.tolist(), self.rows)

    def sizes(self, lengths: np.ndarray, minis: list[np.ndarray]) -> list[list[int]]:
        """Tokens of each micro-batch of each of these mini-batches of rows of these lengths."""
        return [[int(lengths[members][group].sum()) for group in self.split(lengths[members])] for members in minis]

    def fitted(self, memory: ActivationMemory, lengths: np.ndarray, minis: list[np.ndarray]) -> MicroBatchPlan:
        """This plan with as many tokens a micro-batch as cost the least time in the memory there is, at most
        ``max_tokens``, and the model made ready for it, see ``ActivationMemory.fit``. Collective. One that counts rows
        stays as it is."""
        plan = self
        if self.use_dynamic_bsz:
            limit = memory.cheapest_limit(
                self.max_tokens, lambda tokens: replace(self, max_tokens=tokens).sizes(lengths, minis)
            )
            plan = replace(self, max_tokens=limit)
        memory.fit(plan.sizes(lengths, minis))
        return plan

    def hint(self, lengths: np.ndarray, minis: list[np.ndarray]) -> str | None:
        """What to set for fuller micro-batches, where a fixed number of rows leaves them less than half full."""
        if self.use_dynamic_bsz:
            return None
        mean = int(lengths.sum()) / max(1, sum(map(len, self.sizes(lengths, minis))))
        if 2 * mean > self.max_tokens:
            return None
        return (
            f"{self.key}micro_batch_size_per_gpu={self.rows} gives micro-batches of {mean:,.0f} tokens on average. "
            f"{self.key.rpartition('.')[0]}.use_dynamic_bsz=True fills them up to "
            f"{self.key}max_token_len_per_gpu={self.max_tokens}: the same update, in less time"
        )


@dataclass(frozen=True)
class MicroBatch:
    """Packed rows with their response tensors on the device; ``columns[name]`` is ``(rows, width)``."""

    packed: PackedRows
    indices: np.ndarray  # positions in the rank's rows; empty for a filler
    mask: torch.Tensor  # (rows, width) float32
    columns: dict[str, torch.Tensor]
    first: bool  # of the rows that were asked for, on every rank alike
    last: bool

    @property
    def width(self) -> int:
        return int(self.mask.shape[1])


def split_mini_batches(
    data: DataProto, rows_per_step: int, device: torch.device | str
) -> list[np.ndarray]:
    """Row positions of each optimiser step, in order. Collective.

    ``batch["mini_batch"]`` decides where present: each id is one step. Otherwise rows are taken in order,
    ``rows_per_step`` (of this rank) at a time. Ranks must agree on the steps, or collectives would wait for ever or mix
    rows of different steps.
    """
    if "mini_batch" in data.batch.keys():
        ids = data.batch["mini_batch"].numpy()
        steps = np.unique(ids)
        minis = [np.flatnonzero(ids == i) for i in steps]
    else:
        minis = [np.array(group) for group in split_by_rows(len(data), rows_per_step)]
        steps = np.arange(len(minis))
    _assert_agreed(torch.tensor([len(steps)], device=device), "the number of mini-batches")
    _assert_agreed(torch.from_numpy(steps.astype(np.int64)).to(device), "the ids of the mini-batches")
    return minis


def mini_batch_order(count: int, epoch: int, shuffle: bool) -> list[int]:
    """Order of the mini-batches in an epoch, the same on all ranks; the first epoch keeps the driver's."""
    if not shuffle or epoch == 0:
        return list(range(count))
    return np.random.default_rng(epoch).permutation(count).tolist()


def _assert_agreed(values: torch.Tensor, what: str) -> None:
    limits = torch.cat([values, -values])
    dist.all_reduce(limits, op=dist.ReduceOp.MAX)
    most, least = limits.chunk(2)
    assert torch.equal(most, -least), f"ranks disagree on {what}: up to {most.tolist()}, down to {(-least).tolist()}"


def micro_batches(
    data: DataProto,
    rows: RaggedRows,
    members: np.ndarray,
    plan: MicroBatchPlan,
    column_names: list[str],
    device: torch.device | str,
) -> Iterator[MicroBatch]:
    """Micro-batches over the rows ``members``, the same number on every rank. Collective at the start."""
    groups = plan.split(rows.lengths[members])
    count = torch.tensor(len(groups), device=device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    groups += [[] for _ in range(int(count) - len(groups))]
    for number, group in enumerate(groups, 1):
        indices = members[group] if group else np.zeros(0, dtype=np.int64)
        packed = rows.pack(indices, device)
        width = max(1, int(max((len(rows.responses[i]) for i in indices), default=0)))
        yield MicroBatch(
            packed=packed,
            indices=indices,
            mask=_take(rows.mask, indices, width, device),
            columns={name: _take(data.batch[name].float(), indices, width, device) for name in column_names},
            first=number == 1,
            last=number == len(groups),
        )


def _take(matrix: torch.Tensor, indices: np.ndarray, width: int, device: torch.device | str) -> torch.Tensor:
    if not len(indices):
        return torch.zeros(1, width, device=device)
    return matrix[torch.from_numpy(indices), :width].to(device, non_blocking=True)


@dataclass
class MetricSums:
    """Metrics of an update, exact over all micro-batches, mini-batches and ranks. Three kinds:

    ``add``: a mean over tokens, as sum and count. ``add_share``: this micro-batch's part of a number that is whole once
    per optimiser step (a normalised loss); reported as the mean over steps. ``end_step``: numbers that all ranks
    already agree on (gradient norm), reported as the mean over steps.
    """

    device: torch.device | str
    _sums: dict[str, torch.Tensor] = field(default_factory=dict)
    _shares: dict[str, torch.Tensor] = field(default_factory=dict)
    _agreed: dict[str, float] = field(default_factory=dict)
    _steps: int = 0

    def add(self, name: str, total: torch.Tensor, count: torch.Tensor) -> None:
        """Add a sum over ``count`` values."""
        pair = torch.stack([total.detach().double(), count.detach().double()])
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def add_share(self, name: str, share: torch.Tensor) -> None:
        """Add a part of a step's value."""
        share = share.detach().double()
        self._shares[name] = self._shares[name] + share if name in self._shares else share

    def end_step(self, **agreed: float) -> None:
        """Close an optimiser step; ``agreed`` are numbers that are the same on all ranks (``a__b`` means ``a/b``)."""
        self._steps += 1
        for name, value in agreed.items():
            name = name.replace("__", "/")
            self._agreed[name] = self._agreed.get(name, 0.0) + value

    def reduce(self) -> dict[str, float]:
        """All metrics. Collective; every rank must hold the same names. A mean over nothing is 0."""
        steps = max(1, self._steps)
        metrics = {name: value / steps for name, value in self._agreed.items()}
        names, shares = sorted(self._sums), sorted(self._shares)
        rows = [self._sums[name] for name in names]
        rows += [torch.stack([self._shares[name], torch.zeros_like(self._shares[name])]) for name in shares]
        if not rows:
            return metrics
        table = torch.stack(rows)  # (metrics, 2)
        dist.all_reduce(table)
        values = table.tolist()
        for name, (total, count) in zip(names, values):
            metrics[name] = total / count if count else 0.0
        for name, (total, _) in zip(shares, values[len(names) :]):
            metrics[name] = total / steps
        return metrics
