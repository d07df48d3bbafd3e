"""Full tensors from the shards of many ranks, with few large collectives.

A collective for each of several hundred parameters costs more on the host than the bytes cost on the wire. So shards
that follow each other are cast and laid side by side as bytes, and one all-gather fetches a whole bucket of them:

    part of rank 0            | part of rank 1
    a[0:2]  b[0:3]  c[0:1]    | a[2:4]  b[3:5], pad  pad

Every rank writes its shards into its own part and the collective fills in the others, so a bucket is one buffer. A full
tensor is a copy that brings its pieces together; for the only tensor of a bucket the pieces lie together already.

Buffers are allocated, written and read on the current stream. `wait` makes that stream wait for the collective, so a
buffer can be dropped like any other tensor, and none is written to a second time.

Left out: buckets for tensors that are split otherwise than by rows over one dimension of a mesh, which no FSDP2 model
here has; each of them is gathered by DTensor itself. Tensors that every rank holds whole take no collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

BUCKET_BYTES = 256 << 20  # of full tensors; several decoder layers of 1.5 B, and one of 7 B

_ALIGNMENT = 16  # bytes; every dtype can be viewed there
# The older of the two names warns in torch versions that have the newer.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, eq=False)
class Source:
    """A tensor that is wanted whole, and the dtype to cast it to on the way."""

    tensor: torch.Tensor
    dtype: torch.dtype

    @property
    def key(self) -> tuple[int, torch.dtype]:
        return id(self.tensor), self.dtype


@dataclass(frozen=True)
class _Slot:
    """Where a rank's part of a bucket holds its shard of `source`: bytes `start` to `stop`, room for `rows` rows."""

    source: Source
    start: int
    stop: int
    rows: int


@dataclass
class _Bucket:
    requests: list[int] = field(default_factory=list)  # numbers of the requests that are complete with this bucket
    slots: list[_Slot] = field(default_factory=list)
    part_bytes: int = 0  # of one rank


class BucketedGather:
    """Iterates over requests: for each the full tensors of its sources, in order, on `device`.

    requests: sources that are wanted together; the same on all ranks. A source of several requests is gathered once
    and kept until the last. bucket_bytes: size of a bucket; a larger tensor has a bucket of its own.

    All ranks must iterate to the end, in lockstep. The next bucket is on its way while the present one is handed out,
    so a rank holds two buckets and the tensors that the receiver has. A tensor stays as it is for as long as it is
    held; it may be the parameter's own memory, or all of a bucket, so the receiver copies and lets go.
    """

    def __init__(
        self, requests: Sequence[Sequence[Source]], device: torch.device | str, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._requests = requests
        self._device = torch.device(device)
        groups = {s.key: sharding_group(s.tensor) for request in requests for s in request}
        self._group = next((group for group in groups.values() if group is not None), None)
        self._splits = {key for key, group in groups.items() if group is not None and group == self._group}
        self._slots: dict[tuple[int, torch.dtype], _Slot] = {}
        self._last_use = {source.key: index for index, request in enumerate(requests) for source in request}
        self._buckets = [_Bucket()]
        for index, request in enumerate(requests):
            self._place(index, request, bucket_bytes)

    @property
    def collectives(self) -> int:
        """Number of all-gathers of buckets."""
        return sum(bucket.part_bytes > 0 for bucket in self._buckets)

    @torch.no_grad()
    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        kept: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        under_way = self._start(self._buckets[0])
        for bucket, following in zip(self._buckets, [*self._buckets[1:], None]):
            buffer = under_way and _arrived(*under_way)
            under_way = None
            for position, index in enumerate(bucket.requests):
                yield [self._full(source, index, buffer, kept) for source in self._requests[index]]
                if position == 0 and following is not None:  # not before: the receiver held on to the last bucket
                    under_way = self._start(following)

    def _place(self, index: int, request: Sequence[Source], bucket_bytes: int) -> None:
        """Give a request's sources room in the last bucket, or begin a new one."""
        if self._group is not None:
            size = self._group.size()
            new = {s.key: s for s in request if s.key in self._splits and s.key not in self._slots}
            needed = sum(_slot_bytes(source, size) for source in new.values())
            bucket = self._buckets[-1]
            if needed and bucket.part_bytes and size * (bucket.part_bytes + needed) > bucket_bytes:
                bucket = _Bucket()
                self._buckets.append(bucket)
            for key, source in new.items():
                rows = _rows(source, size)
                used = rows * math.prod(source.tensor.shape[1:]) * source.dtype.itemsize
                slot = _Slot(source, bucket.part_bytes, bucket.part_bytes + used, rows)
                bucket.slots.append(slot)
                bucket.part_bytes += _slot_bytes(source, size)
                self._slots[key] = slot
        self._buckets[-1].requests.append(index)

    def _start(self, bucket: _Bucket) -> tuple[torch.Tensor, dist.Work] | None:
        """Cast the shards into a new buffer, (ranks, part_bytes) uint8, and begin to gather."""
        if not bucket.part_bytes:
            return None
        size, rank = self._group.size(), self._group.rank()
        buffer = torch.empty(size, bucket.part_bytes, dtype=torch.uint8, device=self._device)
        part = buffer[rank]
        for slot in bucket.slots:
            shape = slot.source.tensor.shape
            rows = min(max(shape[0] - rank * slot.rows, 0), slot.rows)
            elements = rows * math.prod(shape[1:])
            place = part[slot.start : slot.start + elements * slot.source.dtype.itemsize].view(slot.source.dtype)
            place.copy_(_on_device(slot.source.tensor.to_local(), self._device).reshape(-1))
        return buffer, _all_gather(buffer.view(-1), part, group=self._group, async_op=True)

    def _full(
        self,
        source: Source,
        index: int,
        buffer: torch.Tensor | None,
        kept: dict[tuple[int, torch.dtype], torch.Tensor],
    ) -> torch.Tensor:
        """The full tensor for request `index`: kept from an earlier one, out of the buffer, or by itself."""
        slot = self._slots.get(source.key)
        if slot is None:
            return gather_full(source.tensor, source.dtype, self._device)
        full = kept.pop(source.key, None)
        if full is None:
            shape = source.tensor.shape
            pieces = buffer[:, slot.start : slot.stop].view(source.dtype)  # (ranks, elements of a padded shard)
            full = pieces.reshape(self._group.size() * slot.rows, *shape[1:])[: shape[0]].contiguous()
        if index < self._last_use[source.key]:
            kept[source.key] = full
        return full


@torch.no_grad()
def gather_full(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """The full tensor on every rank of the mesh, cast, with a collective of its own unless every rank has it whole.

    Shards that lie in host memory pass through `device`.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach().to(device=device, dtype=dtype)
    local = tensor.to_local().detach().to(device=device, dtype=dtype)
    if not _split_dimensions(tensor):
        return local  # on one GPU the shard is the whole; spares a third of the time
    cast = DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return cast.full_tensor()


def sharding_group(tensor: torch.Tensor) -> dist.ProcessGroup | None:
    """The ranks that hold the rows of `tensor` between them; None if it is whole or split in any other way.

    Over further dimensions of its mesh (HSDP) the tensor is whole: each group gathers for itself.
    """
    split = _split_dimensions(tensor) if isinstance(tensor, DTensor) else []
    if len(split) != 1 or tensor.placements[split[0]] != Shard(0) or type(tensor.placements[split[0]]) is not Shard:
        return None
    return tensor.device_mesh.get_group(split[0])


def _split_dimensions(tensor: DTensor) -> list[int]:
    """Dimensions of the mesh over which ranks hold different things."""
    mesh = tensor.device_mesh
    return [i for i, placement in enumerate(tensor.placements) if mesh.size(i) > 1 and not placement.is_replicate()]


def _rows(source: Source, size: int) -> int:
    """Rows of the largest shard; the last ranks may hold fewer, or none."""
    return -(-source.tensor.shape[0] // size)


def _slot_bytes(source: Source, size: int) -> int:
    used = _rows(source, size) * math.prod(source.tensor.shape[1:]) * source.dtype.itemsize
    return -(-used // _ALIGNMENT) * _ALIGNMENT


def _on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """As it is, so that the device casts: the host would take longer for that than for the copy."""
    return tensor.to(device, non_blocking=device.type == "cuda")


def _arrived(buffer: torch.Tensor, work: dist.Work) -> torch.Tensor:
    work.wait()
    return buffer
