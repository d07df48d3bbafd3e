"""The loaders of batch shells: how many tasks a training step and a validation have."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from verl.trainer.config.schema import DataConfig


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
