"""A mini-batch whose optimiser step was skipped, kept as a file to look at.

::

    torch.load("nonfinite/step_12_actor_mini_3_rank_0.pt", weights_only=False)
    # {"tensors": {"advantages": …, …}, "columns": {"prompt_ids": …}, "meta": {"temperature": 1.0, …}, "rows": array}
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from verl.protocol import DataProto

logger = logging.getLogger(__name__)

MOST_FILES = 16  # of one rank; a run that goes on skipping now and then does not fill the disk


def keep_skipped(data: DataProto, members: np.ndarray, role: str) -> Path | None:
    """Write this rank's rows of a skipped mini-batch; returns the file, or None where none was written.

    A folder that cannot be written to is a warning: the other ranks wait for this one in the next step.

    Args:
        data: rows of the update; ``meta_info["skipped_dir"]`` is the folder (without it nothing is kept) and
            ``meta_info["global_steps"]`` the training step.
        members: positions of the mini-batch's rows.
        role: ``actor`` or ``critic``, part of the file's name.
    """
    folder, step = data.meta_info.get("skipped_dir"), data.meta_info.get("global_steps", 0)
    if folder is None:
        return None
    rank = dist.get_rank() if dist.is_initialized() else 0
    if len(list(Path(folder).glob(f"*_rank_{rank}.pt"))) >= MOST_FILES:
        return None
    mini = int(data.batch["mini_batch"][int(members[0])]) if "mini_batch" in data.batch.keys() and len(members) else 0
    path = Path(folder) / f"step_{step}_{role}_mini_{mini}_rank_{rank}.pt"
    rows = torch.from_numpy(np.asarray(members, dtype=np.int64))
    content = {
        "tensors": {key: value[rows].cpu() for key, value in data.batch.items()},
        "columns": {key: values[members] for key, values in data.non_tensor_batch.items()},
        "meta": dict(data.meta_info),
        "rows": np.asarray(members),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, path)
    except OSError as error:
        logger.warning("the skipped mini-batch could not be kept as %s: %s", path, error)
        return None
    logger.warning("the skipped mini-batch is kept as %s", path)
    return path
