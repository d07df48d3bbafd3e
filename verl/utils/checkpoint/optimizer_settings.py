"""What a run's configuration says of its optimiser, kept over the loading of a checkpoint that says otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

_NAMES = ("lr", "betas", "weight_decay")


def optimizer_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """``lr`` (before the schedule's factor), ``betas`` and ``weight_decay`` of each parameter group."""
    groups = []
    for group in optimizer.param_groups:
        values = {name: group[name] for name in _NAMES if name in group}
        values["lr"] = group.get("initial_lr", group["lr"])
        groups.append(values)
    return groups


def keep_settings(
    optimizer: torch.optim.Optimizer, scheduler: LambdaLR | None, configured: list[dict[str, Any]], section: str
) -> str:
    """Put ``configured`` in the place of what a checkpoint brought; the schedule stays where the checkpoint left it.

    Args:
        optimizer, scheduler: as they are after loading.
        configured: ``optimizer_settings`` from before.
        section: the configuration's section that the settings are of, such as ``critic.optim``.

    Returns:
        one line that names every setting that differs; empty where none does.
    """
    changes: dict[str, None] = {}
    for loaded, wanted, group in zip(optimizer_settings(optimizer), configured, optimizer.param_groups):
        for name, value in wanted.items():
            if _plain(loaded[name]) != _plain(value):
                line = f"{section}.{name}: {_plain(loaded[name])} in the checkpoint, {_plain(value)} from now on"
                changes[line] = None
            group[name] = value
        if scheduler is not None:
            group["initial_lr"] = wanted["lr"]
    if scheduler is not None:
        scheduler.base_lrs = [wanted["lr"] for wanted in configured]
        rates = [
            base * factor(scheduler.last_epoch) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas)
        ]
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate
        scheduler._last_lr = rates
    return "; ".join(changes)


def _plain(value: Any) -> Any:
    """Numbers and lists of numbers, whatever a checkpoint made of tuples and floats."""
    return [float(part) for part in value] if isinstance(value, (list, tuple)) else float(value)
