"""Reading the sharded weights of a checkpoint in one process, without a process group.

Two layouts are understood, written by any number of ranks:

``dist_ckpt/``
    what this trainer writes (``torch.distributed.checkpoint``); its metadata names every piece of every tensor.
``model_world_size_{W}_rank_{r}.pt``
    one file a rank with the rank's part of every tensor, as verl and verl-agent write them.

Whether all pieces are there in full is checked before anything is read.
"""

from __future__ import annotations

import pickle
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, Shard

from verl.utils.checkpoint.fsdp_checkpoint_manager import SHARDS

_RANK_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_PREFIX = "model."
_UNREADABLE = (OSError, EOFError, RuntimeError, KeyError, pickle.UnpicklingError, CheckpointException)


class ShardReader(ABC):
    """The tensors of a sharded model by name; none is read before ``load``.

    Attributes:
        shapes: full shape of every tensor.
        dtypes: as stored.
        num_files: files that hold the pieces.
    """

    shapes: dict[str, torch.Size]
    dtypes: dict[str, torch.dtype]
    num_files: int

    @abstractmethod
    def load(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Full tensors on the CPU, in their stored dtype.

        Raises:
            ValueError: a file cannot be read.
        """


def open_shards(folder: Path) -> ShardReader:
    """The reader for the layout that ``folder`` has.

    Raises:
        ValueError: there is no such checkpoint, it was not finished, or pieces of it are missing.
    """
    if not folder.is_dir():
        raise ValueError(f"--local_dir {folder}: there is no such folder")
    unfinished = [part for part in folder.absolute().parts[-2:] if part.endswith(".tmp")]
    if unfinished:
        raise ValueError(f"--local_dir {folder}: {unfinished[0]} was never finished; take a step that was")
    if (folder / SHARDS).is_dir():
        return DcpReader(folder / SHARDS)
    if any(_RANK_FILE.fullmatch(path.name) for path in folder.glob("*.pt")):
        return RankFileReader(folder)
    inner = [path.parent for pattern in (SHARDS, "model_world_size_*") for path in sorted(folder.glob(f"*/{pattern}"))]
    hint = f"; did you mean {inner[0]}?" if inner else "; give the folder …/global_step_N/actor of a run"
    raise ValueError(
        f"--local_dir {folder} holds no sharded model (neither {SHARDS}/ nor model_world_size_*_rank_*.pt){hint}"
    )


class DcpReader(ShardReader):
    """``dist_ckpt/``: pieces in ``*.distcp`` files, described by ``.metadata``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        metadata = self._read_metadata()
        entries = {
            name.removeprefix(_PREFIX): entry
            for name, entry in metadata.state_dict_metadata.items()
            if name.startswith(_PREFIX) and isinstance(entry, TensorStorageMetadata)
        }
        if not entries:
            raise ValueError(f"{folder} holds no model, only {sorted(metadata.state_dict_metadata)[:3]}")
        self.shapes = {name: entry.size for name, entry in entries.items()}
        self.dtypes = {name: entry.properties.dtype for name, entry in entries.items()}
        self.num_files = self._check_files(metadata)

    def load(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        wanted = {_PREFIX + name: torch.empty(self.shapes[name], dtype=self.dtypes[name]) for name in names}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
                dcp.load(wanted, storage_reader=FileSystemReader(self._folder), no_dist=True)
        except _UNREADABLE as error:
            raise ValueError(f"{self._folder} is damaged, its tensors cannot be read: {_first_line(error)}") from error
        return {name.removeprefix(_PREFIX): tensor for name, tensor in wanted.items()}

    def _read_metadata(self) -> Metadata:
        file = self._folder / ".metadata"
        if not file.is_file():
            raise ValueError(f"{file} is missing: the checkpoint was not copied in full, or not finished")
        try:
            return FileSystemReader(self._folder).read_metadata()
        except (*_UNREADABLE, AttributeError, ValueError) as error:
            raise ValueError(f"{file} is damaged: {_first_line(error)}") from error

    def _check_files(self, metadata: Metadata) -> int:
        """Every file that pieces lie in is there and long enough; returns how many there are."""
        ends: dict[str, int] = {}
        for place in (metadata.storage_data or {}).values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        missing = sorted(name for name in ends if not (self._folder / name).is_file())
        if missing:
            raise ValueError(
                f"{self._folder} lacks {len(missing)} of {len(ends)} files ({', '.join(missing[:4])}): every rank "
                "writes its own; copy those of all machines into one folder"
            )
        short = sorted(name for name, end in ends.items() if (self._folder / name).stat().st_size < end)
        if short:
            size = (self._folder / short[0]).stat().st_size
            raise ValueError(
                f"{self._folder / short[0]} is truncated: {size} bytes, {ends[short[0]]} are needed; copy it again"
            )
        return len(ends)


class RankFileReader(ShardReader):
    """``model_world_size_{W}_rank_{r}.pt``: each rank's part of every tensor, sharded along one dimension."""

    def __init__(self, folder: Path) -> None:
        found = [match for path in folder.glob("*.pt") if (match := _RANK_FILE.fullmatch(path.name))]
        sizes = {int(match.group(1)) for match in found}
        if len(sizes) != 1:
            raise ValueError(f"{folder} mixes rank files of {sorted(sizes)} ranks; keep those of one run")
        self.num_files = sizes.pop()
        missing = sorted(set(range(self.num_files)) - {int(match.group(2)) for match in found})
        if missing:
            raise ValueError(
                f"{folder} lacks the files of {len(missing)} of {self.num_files} ranks (rank "
                f"{', '.join(map(str, missing[:8]))}): copy those of all machines into one folder"
            )
        files = [folder / f"model_world_size_{self.num_files}_rank_{rank}.pt" for rank in range(self.num_files)]
        self._ranks = [_read_rank_file(file) for file in files]
        for file, part in zip(files, self._ranks):
            if part.keys() != self._ranks[0].keys():
                raise ValueError(f"{file} holds other tensors than {files[0]}")
        self.shapes = {name: tensor.shape for name, tensor in self._ranks[0].items()}
        self.dtypes = {name: tensor.dtype for name, tensor in self._ranks[0].items()}

    def load(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        return {name: _assemble(name, [part[name] for part in self._ranks]) for name in names}


def _read_rank_file(file: Path) -> dict[str, Any]:
    """One rank's tensors, mapped into memory. Only tensors are unpickled, no code is run."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except _UNREADABLE as error:
        raise ValueError(f"{file} is damaged or no rank file: {_first_line(error)}") from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError(f"{file} holds something else than tensors by name")
    return state


def _assemble(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """The full tensor from all ranks' parts; replicas (HSDP) beyond the first are left out.

    Raises:
        ValueError: it is sharded along more than one dimension, or the parts do not make it up.
    """
    first = parts[0]
    if not isinstance(first, DTensor):
        return first
    sharded = [index for index, placement in enumerate(first.placements) if isinstance(placement, Shard)]
    if len(sharded) > 1:
        raise ValueError(f"{name} is sharded along several mesh dimensions ({first.placements}); one is supported")
    if not sharded:
        return first.to_local()
    mesh = first.device_mesh.mesh.movedim(sharded[0], -1)  # rank numbers, the sharding dimension last
    ranks = mesh.reshape(-1, mesh.shape[-1])[0].tolist()
    full = torch.cat([parts[rank].to_local() for rank in ranks], dim=first.placements[sharded[0]].dim)
    if full.shape != first.shape:
        raise ValueError(f"the parts of {name} make {tuple(full.shape)}, not {tuple(first.shape)}: files of two runs")
    return full


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
