"""Learning-rate schedules as factors of the configured rate; they step once per training step."""

from __future__ import annotations

import math
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def constant_factor(step: int, num_warmup_steps: int) -> float:
    """Linear from 0 to 1 over the warm-up (step 0 has factor 0), then 1."""
    return min(1.0, step / num_warmup_steps) if num_warmup_steps > 0 else 1.0


def cosine_factor(
    step: int, num_warmup_steps: int, num_training_steps: int, min_lr_ratio: float, num_cycles: float
) -> float:
    """Linear from ``min_lr_ratio`` to 1 over the warm-up, then a cosine down to ``min_lr_ratio``."""
    if step < num_warmup_steps:
        return min_lr_ratio + (1.0 - min_lr_ratio) * step / num_warmup_steps
    progress = (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
    wave = math.cos(math.pi * 2.0 * num_cycles * progress)
    return max(min_lr_ratio, wave * (1.0 - min_lr_ratio) / 2.0 + (1.0 + min_lr_ratio) / 2.0)


def get_constant_schedule_with_warmup(optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> LambdaLR:
    """``constant_factor`` as a scheduler."""
    return LambdaLR(optimizer, partial(constant_factor, num_warmup_steps=num_warmup_steps), last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float | None = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> LambdaLR:
    """``cosine_factor`` as a scheduler; ``min_lr_ratio`` None means 0."""
    ratio = 0.0 if min_lr_ratio is None else min_lr_ratio
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"optim.min_lr_ratio must lie in [0, 1], got {min_lr_ratio}")
    factor = partial(
        cosine_factor,
        num_warmup_steps=num_warmup_steps,
        num_training_steps=num_training_steps,
        min_lr_ratio=ratio,
        num_cycles=num_cycles,
    )
    return LambdaLR(optimizer, factor, last_epoch)


def warmup_steps(lr_warmup_steps: int, lr_warmup_steps_ratio: float, total_steps: int) -> int:
    """Warm-up length: the absolute number, or the ratio of all steps when that is negative."""
    return lr_warmup_steps if lr_warmup_steps >= 0 else int(lr_warmup_steps_ratio * total_steps)


def wsd_factor(
    step: int,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float,
    num_cycles: float,
    stable_ratio: float,
) -> float:
    """Warm-up from 0, a plateau of ``stable_ratio`` of the rest, then a cosine down to ``min_lr_ratio``."""
    plateau_end = num_warmup_steps + int(stable_ratio * max(0, num_training_steps - num_warmup_steps))
    if step < num_warmup_steps:
        return step / max(1, num_warmup_steps)
    if step < plateau_end:
        return 1.0
    progress = (step - plateau_end) / max(1, num_training_steps - plateau_end)
    wave = 0.5 * (1.0 + math.cos(math.pi * 2.0 * num_cycles * progress))
    return max(0.0, wave * (1.0 - min_lr_ratio) + min_lr_ratio)


def get_wsd_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    stable_ratio: float = 0.9,
) -> LambdaLR:
    """``wsd_factor`` (warm-up, stable, decay) as a scheduler."""
    factor = partial(
        wsd_factor,
        num_warmup_steps=num_warmup_steps,
        num_training_steps=num_training_steps,
        min_lr_ratio=min_lr_ratio,
        num_cycles=num_cycles,
        stable_ratio=stable_ratio,
    )
    return LambdaLR(optimizer, factor, last_epoch)
