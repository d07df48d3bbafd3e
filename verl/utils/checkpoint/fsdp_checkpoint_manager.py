"""Save and load the sharded state of one model, with ``torch.distributed.checkpoint``.

Layout of ``{dir}/global_step_{n}/actor/``::

    dist_ckpt/                model and optimiser shards; any number of ranks can read them
    extra_state_rank_{r}.pt   learning-rate scheduler and random state of rank r
    checkpoint.json           step, number of ranks, model that training started from
    config.json, generation_config.json, tokenizer files
    lora_adapter/             when LoRA is on, as peft reads it
    huggingface/              when contents has hf_model: full weights in bf16 on CUDA, else in their own dtype

A save goes to ``{path}.tmp`` and is renamed when complete, so what carries the final name is whole. On shared or
local storage alike, all ranks must see the same path.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim.lr_scheduler import LambdaLR

from verl.models.lora import LoraSettings, save_adapter
from verl.trainer.config.earlier_run import RESOLVED_NAME
from verl.utils.checkpoint.errors import explained_read, explained_write
from verl.utils.checkpoint.hf_export import export_model, full_parameters, save_model_description
from verl.utils.checkpoint.optimizer_settings import keep_settings, optimizer_settings
from verl.utils.rng import get_rng_state, set_rng_state

logger = logging.getLogger(__name__)

SHARDS = "dist_ckpt"
DESCRIPTION_FILE = "checkpoint.json"
CONTENTS = ("model", "optimizer", "extra", "hf_model")
_STEP = re.compile(r"global_step_(\d+)$")


class FSDPCheckpointManager:
    """Checkpoints of one FSDP2 model with its optimiser and scheduler. Every method is collective.

    ``optim_section`` is where the configuration has the optimiser's settings, such as ``critic.optim``; they hold
    after loading as well, whatever the checkpoint was made with.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: LambdaLR | None = None,
        processing_class: Any | None = None,
        contents: Sequence[str] = ("model", "optimizer", "extra"),
        lora: LoraSettings | None = None,
        base_path: str = "",
        optim_section: str = "optim",
    ) -> None:
        unknown = set(contents) - set(CONTENTS)
        if unknown:
            raise ValueError(f"checkpoint.contents holds {sorted(unknown)}; it takes {list(CONTENTS)}")
        self.model = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.processing_class = processing_class
        self.contents = tuple(contents)
        self.lora = lora
        self.base_path = base_path
        self.optim_section = optim_section

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Write a checkpoint to ``local_path``; replaces one of the same name.

        Args:
            hdfs_path: not supported; ValueError when given.
            global_step: recorded in the extra state.
            max_ckpt_to_keep: remove this model's folders of older steps beyond that many; None keeps all.

        Raises:
            CheckpointWriteError: the disk is full or does not let itself be written to; nothing is left half.
        """
        if hdfs_path is not None:
            raise ValueError("checkpoints go to local or shared folders; leave trainer.default_hdfs_dir unset")
        final = Path(local_path)
        partial = final.with_name(final.name + ".tmp")
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            with explained_write(partial):
                partial.mkdir(parents=True)
        dist.barrier()
        with explained_write(partial):
            dcp.save(self._sharded_state(), checkpoint_id=partial / SHARDS)
            if "extra" in self.contents:
                torch.save(self._extra_state(global_step), partial / f"extra_state_rank_{dist.get_rank()}.pt")
            self._save_portable(partial, global_step)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(final, ignore_errors=True)
            os.replace(partial, final)
            if max_ckpt_to_keep is not None:
                remove_old_checkpoints(final, max_ckpt_to_keep)
        dist.barrier()

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> int:
        """Load what ``save_checkpoint`` wrote, on any number of ranks; returns its global step (0 if not recorded).

        Learning rate, betas and weight decay stay those of this run. A warning names those that were others, unless a
        configuration lies beside the folder: what has changed since that one is the driver's to say.

        Raises:
            ValueError: the folder is missing, holds no checkpoint, or one that cannot be read.
        """
        folder = Path(local_path)
        if not (folder / SHARDS / ".metadata").is_file():
            raise ValueError(
                f"{local_path} holds no checkpoint of this trainer: check trainer.resume_from_path, or start afresh "
                "with trainer.resume_mode=disable"
            )
        configured = optimizer_settings(self.optimizer) if self.optimizer is not None else []
        state = self._sharded_state()
        with explained_read(folder):
            dcp.load(state, checkpoint_id=folder / SHARDS)
            set_state_dict(
                self.model,
                self._optimizers(),
                model_state_dict=state.get("model", {}),
                optim_state_dict=state.get("optimizer", {}),
                options=StateDictOptions(strict="model" in state),
            )
            step = self._load_extra(folder)
        if self.optimizer is not None:
            changes = keep_settings(self.optimizer, self.lr_scheduler, configured, self.optim_section)
            if changes and dist.get_rank() == 0 and not (folder.parent / f"{RESOLVED_NAME}.yaml").is_file():
                logger.warning(changes)
        dist.barrier()
        if del_local_after_load and dist.get_rank() == 0:
            shutil.rmtree(folder)
        return step

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        keep = self.optimizer is not None and "optimizer" in self.contents
        return [self.optimizer] if keep else []

    def _sharded_state(self) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(self.model, self._optimizers())
        state: dict[str, Any] = {}
        if "model" in self.contents:
            state["model"] = model_state
        if self._optimizers():
            state["optimizer"] = optimizer_state
        return state

    def _extra_state(self, global_step: int) -> dict[str, Any]:
        scheduler = self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None
        return {"global_step": global_step, "lr_scheduler": scheduler, "rng": get_rng_state()}

    def _load_extra(self, folder: Path) -> int:
        if "extra" not in self.contents:
            return 0
        rank = dist.get_rank()
        own = folder / f"extra_state_rank_{rank}.pt"
        first = folder / "extra_state_rank_0.pt"
        if not own.is_file() and rank < _ranks_that_wrote(folder):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(own))
        extra = torch.load(own if own.is_file() else first, weights_only=False)
        if own.is_file():
            set_rng_state(extra["rng"])
        else:
            logger.warning("%s was written by fewer ranks: rank %d keeps its fresh random state", folder, rank)
        if self.lr_scheduler is not None and extra["lr_scheduler"] is not None:
            self.lr_scheduler.load_state_dict(extra["lr_scheduler"])
        return int(extra["global_step"])

    def _save_portable(self, folder: Path, global_step: int) -> None:
        if dist.get_rank() == 0:
            ranks = dist.get_world_size()
            description = {"global_step": global_step, "world_size": ranks, "base_model": self.base_path}
            (folder / DESCRIPTION_FILE).write_text(json.dumps(description, indent=1), encoding="utf-8")
            save_model_description(self.model, folder, self.processing_class)
        if self.lora is not None:
            adapter = {name: tensor.cpu() for name, tensor in full_parameters(self.model) if self.lora.trains(name)}
            if dist.get_rank() == 0:
                save_adapter(folder / "lora_adapter", adapter, self.lora, self.base_path)
        if "hf_model" in self.contents:
            on_cuda = next(self.model.parameters()).is_cuda
            export_model(
                self.model, folder / "huggingface", self.processing_class, torch.bfloat16 if on_cuda else None
            )


def _ranks_that_wrote(folder: Path) -> int:
    """The number of ranks of the run that wrote a checkpoint; 1 where it does not say."""
    description = folder / DESCRIPTION_FILE
    return int(json.loads(description.read_text(encoding="utf-8"))["world_size"]) if description.is_file() else 1


def remove_old_checkpoints(newest: Path, keep: int) -> None:
    """Drop this model's folders of other steps that were written first, beyond ``keep`` in all (at least one stays).

    ``newest`` is ``{root}/global_step_{n}/{name}``; a step folder left empty goes too. A path of another shape is left
    alone.
    """
    root, name = newest.parent.parent, newest.name
    if not _STEP.search(newest.parent.name.removesuffix(".tmp")):
        logger.warning("%s is not inside a global_step_<n> folder: nothing is rotated", newest)
        return
    older = [
        folder / name
        for folder in root.glob("global_step_*")
        if _STEP.search(folder.name) and (folder / name).is_dir() and folder != newest.parent
    ]
    older.sort(key=lambda path: (path.stat().st_mtime_ns, int(_STEP.search(path.parent.name).group(1))))
    for path in older[: max(0, len(older) - (max(keep, 1) - 1))]:
        shutil.rmtree(path)
        if not any(path.parent.iterdir()):
            path.parent.rmdir()
        logger.info("removed old checkpoint %s", path)
