"""The loaders of batch shells: how many tasks a training step and a validation have."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

from torch.utils.data import SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from verl.trainer.config.schema import DataConfig

logger = logging.getLogger(__name__)


def create_dataloaders(
    data: DataConfig,
    train_dataset: Any,
    val_dataset: Any,
    collate_fn: Callable[[list[dict[str, Any]]], dict[str, Any]],
    sampler: Any,
) -> tuple[StatefulDataLoader, StatefulDataLoader]:
    """The loaders of training and validation; the former can be resumed.

    Raises:
        ValueError: the training data does not fill a batch.
    """
    batch_size = data.gen_batch_size or data.train_batch_size
    if len(train_dataset) < batch_size:
        key = "data.gen_batch_size" if data.gen_batch_size else "data.train_batch_size"
        raise ValueError(
            f"data.train_files hold {len(train_dataset)} rows, fewer than {key}={batch_size}: no batch can be made; "
            f"write more with python -m examples.data_preprocess.prepare --train_data_size {batch_size}"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata's matter
        train = StatefulDataLoader(
            train_dataset,
            batch_size=batch_size,
            num_workers=data.dataloader_num_workers,
            drop_last=True,
            collate_fn=collate_fn,
            sampler=sampler,
        )
        validation = StatefulDataLoader(
            val_dataset, batch_size=data.val_batch_size, num_workers=0, drop_last=False, collate_fn=collate_fn
        )
    return train, validation


def position_shape(loader: StatefulDataLoader) -> dict[str, Any]:
    """What the position of ``loader`` counts, by the keys that it follows from: a position fits no other shape."""
    return {
        "rows of data.train_files": len(loader.dataset),
        "data.train_batch_size (data.gen_batch_size)": loader.batch_size,
        "data.shuffle": not isinstance(loader.sampler, SequentialSampler),
        "data.dataloader_num_workers": loader.num_workers,
    }


def restore_position(loader: StatefulDataLoader, position: dict[str, Any], shape: dict[str, Any]) -> None:
    """Let ``loader`` go on where a checkpoint's stood; from its first row, with a warning, if the shape is another.

    Args:
        loader: not iterated yet.
        position: ``state_dict`` of the checkpoint's loader.
        shape: ``position_shape`` of it; empty in a checkpoint that does not say.
    """
    now = position_shape(loader)
    if shape == now:
        loader.load_state_dict(position)
        return
    changed = [key for key in now if key in shape and shape[key] != now[key]]
    changes = [f"{key}: {shape[key]} in the checkpoint, {now[key]} from now on" for key in changed]
    logger.warning(
        "the training data start again from their first row: %s",
        "; ".join(changes) or "the checkpoint does not say what its position in them counts",
    )
