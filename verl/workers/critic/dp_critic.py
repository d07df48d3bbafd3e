"""The data-parallel value network.

Position ``t`` of the output is the value of the state before response token ``t``: what the model says at the token
before it. Positions without a response token are 0 and never trained, the one after the end token included.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from verl.models.activation_memory import ActivationMemory
from verl.models.heads import forward_values
from verl.protocol import DataProto
from verl.trainer.ppo.aggregation import LossNormalizer, token_and_row_counts
from verl.trainer.ppo.value_loss import value_loss_per_token
from verl.utils.fsdp_utils import begin_micro_batch, reshard
from verl.workers.critic.base import BasePPOCritic
from verl.workers.guarded_step import GuardedOptimizer
from verl.workers.rows import RaggedRows
from verl.workers.skipped_batch import keep_skipped
from verl.workers.update_loop import (
    MetricSums,
    MicroBatch,
    MicroBatchPlan,
    micro_batches,
    mini_batch_order,
    split_mini_batches,
)

_COLUMNS = ["values", "returns"]


class DataParallelPPOCritic(BasePPOCritic):
    """Values and their regression on packed rows.

    Args:
        config: ``critic`` of the config.
        critic_module: a model with the packed value head of ``verl.models.heads``.
        critic_optimizer: its optimiser.
        response_length: the constant of ``seq-mean-token-sum-norm``; None takes the width of the rows at hand.
        device: where the model computes. None: where its parameters are, which must not be offloaded then.
    """

    def __init__(
        self,
        config: Any,
        critic_module: nn.Module,
        critic_optimizer: torch.optim.Optimizer,
        response_length: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(config)
        self.critic_module = critic_module
        self.critic_optimizer = critic_optimizer
        self.response_length = response_length
        self.update_plan = MicroBatchPlan.of_section(config, "ppo_", "critic", "use_dynamic_bsz")
        self.forward_plan = MicroBatchPlan.of_section(config, "forward_", "critic", "use_dynamic_bsz")
        self.device = device or next(critic_module.parameters()).device
        self.memory = ActivationMemory(critic_module, critic_optimizer, self.device)
        self.guard = GuardedOptimizer(critic_module, critic_optimizer, config.grad_clip)

    @torch.no_grad()
    def compute_values(self, data: DataProto) -> torch.Tensor:
        """Values, float32 ``(N, R)`` on the host, in row order. Collective."""
        self.critic_module.eval()
        rows = RaggedRows(data)
        values = torch.zeros(len(rows), rows.width)
        found: list[tuple[np.ndarray, torch.Tensor]] = []  # rows, their values on the device
        for micro in micro_batches(data, rows, np.arange(len(rows)), self.forward_plan, [], self.device):
            flat = forward_values(self.critic_module, micro.packed)
            if len(micro.indices):
                found.append((micro.indices, micro.packed.scatter_response(flat, micro.width)))
        for indices, padded in found:  # here and not above, where the host would wait for each micro-batch
            values[torch.from_numpy(indices), : padded.shape[1]] = padded.cpu()
        reshard(self.critic_module)
        self.critic_module.train()
        return values * rows.mask

    def update_critic(self, data: DataProto) -> dict[str, float]:
        """One optimiser step per mini-batch and epoch, on rows with ``values`` and ``returns``.

        Returns:
            ``critic/vf_loss vf_clipfrac vpred_mean grad_norm skipped_steps``, exact over all tokens of all ranks.
        """
        self.critic_module.train()
        rows = RaggedRows(data)
        rows_per_step = max(1, self.config.ppo_mini_batch_size // dist.get_world_size())
        minis = split_mini_batches(data, rows_per_step, self.device)
        plan = self.update_plan.fitted(self.memory, rows.lengths, minis)
        sums = MetricSums(self.device)
        skipped_before = self.guard.skipped_steps
        for epoch in range(self.config.ppo_epochs):
            for number in mini_batch_order(len(minis), epoch, self.config.shuffle):
                self._step(data, rows, minis[number], plan, sums)
        metrics = sums.reduce()
        metrics["critic/skipped_steps"] = float(self.guard.skipped_steps - skipped_before)
        metrics["perf/recomputed_layers/critic"] = float(self.memory.recomputed)
        return metrics

    def _step(
        self, data: DataProto, rows: RaggedRows, members: np.ndarray, plan: MicroBatchPlan, sums: MetricSums
    ) -> None:
        counts = token_and_row_counts(rows.mask[torch.from_numpy(members)]).to(self.device)
        dist.all_reduce(counts)
        tokens, row_count = counts.tolist()
        normalizer = LossNormalizer(self.config.loss_agg_mode, tokens, row_count, self.response_length or rows.width)
        total = torch.zeros((), device=self.device)
        self.guard.begin()
        for micro in micro_batches(data, rows, members, plan, _COLUMNS, self.device):
            begin_micro_batch(self.critic_module, micro.last)
            with self.memory.measured(micro.packed.num_tokens, gathers=micro.first):
                loss = self._micro_loss(micro, normalizer, sums)
            (loss * dist.get_world_size()).backward()  # FSDP averages gradients over ranks
            total += loss.detach()
        dist.all_reduce(total)
        norm, _ = self.guard.step(total, on_skip=lambda: keep_skipped(data, members, "critic"))
        sums.end_step(critic__grad_norm=norm)

    def _micro_loss(self, micro: MicroBatch, normalizer: LossNormalizer, sums: MetricSums) -> torch.Tensor:
        flat = forward_values(self.critic_module, micro.packed)
        predicted = micro.packed.scatter_response(flat, micro.width)  # (rows, width)
        loss_matrix, metrics = value_loss_per_token(
            predicted, micro.columns["returns"], micro.columns["values"], micro.mask, self.config.cliprange_value
        )
        for name, (value, count) in metrics.items():
            sums.add(name, value, count)
        loss = normalizer(loss_matrix, micro.mask)
        sums.add_share("critic/vf_loss", loss)
        return loss
