"""The optimiser step all trainers share: clip, refuse what is not finite, step.

A non-finite loss or gradient norm on any rank skips the step on every rank (the norm is global, so all agree without
another collective; the loss flag is reduced by the caller). Three skipped steps in a row stop the run.

A step that ends in an error between its micro-batches, out of memory for instance, is the last one: FSDP2 keeps
gradients of it and, where a backward pass broke off, takes no further gradients, all without a word.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from verl.utils.fsdp_utils import clip_gradients

logger = logging.getLogger(__name__)

MAX_SKIPPED_IN_A_ROW = 3


class GuardedOptimizer:
    """An optimiser with clipping and a watch on non-finite values.

    Attributes:
        skipped_steps: steps skipped since construction.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        grad_clip: float,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.grad_clip = grad_clip
        self.skipped_steps = 0
        self._skipped_in_a_row = 0
        self._begun = False

    def begin(self) -> None:
        """Call it before the first micro-batch of a step.

        Raises:
            RuntimeError: the step before never came to its end.
        """
        if self._begun:
            raise RuntimeError(
                "an optimiser step of this model broke off with an error before, and what is left of it would spoil "
                "the next: start a new process, from a checkpoint"
            )
        self._begun = True

    def step(self, loss: torch.Tensor, on_skip: Callable[[], None] | None = None) -> tuple[float, bool]:
        """One optimiser step on the gradients at hand, which are dropped afterwards.

        Args:
            loss: 0-dim, the mini-batch loss, the same on all ranks.
            on_skip: called if the step is skipped, before an error is raised.

        Returns:
            ``(gradient norm before clipping, whether the step was taken)``.

        Raises:
            RuntimeError: the third step in a row that had to be skipped.
        """
        norm = clip_gradients(self.module.parameters(), self.grad_clip)
        # One transfer for both numbers; a non-finite value anywhere survives the sum of squares in the norm.
        loss_value, norm_value = torch.stack([loss.detach().float().to(norm.device), norm.float()]).tolist()
        finite = all(abs(value) < float("inf") for value in (loss_value, norm_value))
        if finite:
            self.optimizer.step()
            self._skipped_in_a_row = 0
        else:
            self._skip(loss_value, norm_value, on_skip)
        self.optimizer.zero_grad(set_to_none=True)
        self._begun = False
        return norm_value, finite

    def _skip(self, loss: float, norm: float, on_skip: Callable[[], None] | None) -> None:
        self.skipped_steps += 1
        self._skipped_in_a_row += 1
        logger.warning("optimiser step skipped: loss %s, gradient norm %s", loss, norm)
        if on_skip is not None:
            on_skip()
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise RuntimeError(
                f"{self._skipped_in_a_row} optimiser steps in a row had a non-finite loss or gradient "
                f"(last: loss {loss}, gradient norm {norm}). Lower optim.lr or look at the rewards and advantages."
            )
