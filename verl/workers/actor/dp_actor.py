"""The data-parallel policy: every rank holds its own rows and, through FSDP, the whole model.

The loss of an optimiser step is ``policy loss - entropy_coeff * entropy + kl_loss_coef * KL``, each aggregated over the
whole mini-batch (all ranks, all micro-batches) by ``actor.loss_agg_mode``. How rows are split over ranks and
micro-batches changes nothing beyond rounding.
"""

from __future__ import annotations

import functools
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from verl.models.activation_memory import ActivationMemory
from verl.models.heads import forward_log_probs
from verl.protocol import DataProto
from verl.trainer.ppo.aggregation import LossNormalizer, metric_sum, token_and_row_counts
from verl.trainer.ppo.kl import kl_penalty
from verl.trainer.ppo.policy_loss import (
    apply_truncated_importance_sampling,
    check_policy_loss_output,
    get_policy_loss_fn,
)
from verl.utils.fsdp_utils import begin_micro_batch, reshard
from verl.utils.profiling import profile_call
from verl.workers.actor.base import BasePPOActor
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

logger = logging.getLogger(__name__)


class DataParallelPPOActor(BasePPOActor):
    """Log-probabilities and PPO updates on packed rows.

    Args:
        config: ``actor_rollout_ref.actor``; a reference policy may pass it too, its update settings are not read.
        actor_module: a model with the packed head of ``verl.models.heads``, sharded or not.
        actor_optimizer: None for a policy that is not trained.
        log_prob_plan: micro-batches of ``compute_log_prob``; None takes those of the update.
        response_length: ``data.max_response_length``, the constant of ``seq-mean-token-sum-norm``; None takes the
            width of the rows at hand.
        device: where the model computes. None: where its parameters are, which must not be offloaded then.
    """

    def __init__(
        self,
        config: Any,
        actor_module: nn.Module,
        actor_optimizer: torch.optim.Optimizer | None = None,
        log_prob_plan: MicroBatchPlan | None = None,
        response_length: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(config)
        self.actor_module = actor_module
        self.actor_optimizer = actor_optimizer
        self.update_plan = MicroBatchPlan.of_section(config, "ppo_", "actor_rollout_ref.actor", "use_dynamic_bsz")
        self.log_prob_plan = log_prob_plan or self.update_plan
        self.response_length = response_length
        self.device = device or next(actor_module.parameters()).device
        self.memory = ActivationMemory(actor_module, actor_optimizer, self.device)
        self._may_hint = self.device.type == "cuda" and dist.get_rank() == 0
        self.step_seconds: list[float] = []  # of the last update's steps, each until its gradients were known
        self.profile_path: Path | None = None  # where the next update records its second step, or its only one
        self.guard = None
        if actor_optimizer is not None:
            self.guard = GuardedOptimizer(actor_module, actor_optimizer, config.grad_clip)

    @torch.no_grad()
    def compute_log_prob(self, data: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies at ``meta_info["temperature"]``.

        ``meta_info["calculate_entropy"] = False`` leaves the entropies at zero and saves their time. Collective.

        Returns:
            ``(log_probs, entropys)`` on the host, float32 ``(N, R)``, in row order.
        """
        self.actor_module.eval()
        rows = RaggedRows(data)
        with_entropy = data.meta_info.get("calculate_entropy", True)
        log_probs = torch.zeros(len(rows), rows.width)
        entropys = torch.zeros(len(rows), rows.width)
        targets = (log_probs, entropys) if with_entropy else (log_probs,)
        found: list[tuple[np.ndarray, torch.Tensor, torch.Tensor]] = []  # rows, one of targets, values on the device
        for micro in micro_batches(data, rows, np.arange(len(rows)), self.log_prob_plan, [], self.device):
            flat = forward_log_probs(self.actor_module, micro.packed, data.meta_info["temperature"], with_entropy)
            if len(micro.indices):
                found += [
                    (micro.indices, target, micro.packed.scatter_response(values, micro.width))
                    for target, values in zip(targets, flat)
                ]
        for indices, target, values in found:  # here and not above, where the host would wait for each micro-batch
            target[torch.from_numpy(indices), : values.shape[1]] = values.cpu()
        reshard(self.actor_module)
        self.actor_module.train()
        return log_probs, entropys

    def update_policy(self, data: DataProto) -> dict[str, float]:
        """One optimiser step per mini-batch and epoch.

        Args:
            data: rows with ``old_log_probs`` and ``advantages``, with ``ref_log_prob`` if ``use_kl_loss``, and
                ``mini_batch`` where the driver decides which step a row belongs to; ``meta_info["temperature"]``.

        Returns:
            ``actor/*`` metrics, exact over all tokens of all ranks: pg_loss, pg_clipfrac, pg_clipfrac_lower, ppo_kl,
            grad_norm, skipped_steps, and kl_loss, kl_coef, entropy where they enter the loss.
        """
        assert self.guard is not None, "this policy has no optimiser"
        self.actor_module.train()
        rows = RaggedRows(data)
        rows_per_step = max(1, self.config.ppo_mini_batch_size // dist.get_world_size())
        minis = split_mini_batches(data, rows_per_step, self.device)
        self._hint_once(rows, minis)
        plan = self.update_plan.fitted(self.memory, rows.lengths, minis)
        columns = ["old_log_probs", "advantages"]
        columns += ["ref_log_prob"] if self.config.use_kl_loss else []
        columns += ["rollout_log_probs"] if self.config.tis_cap is not None else []
        absent = [name for name in columns if name not in data.batch.keys()]
        if absent == ["rollout_log_probs"]:
            raise ValueError(
                f"actor.tis_cap={self.config.tis_cap:g} needs rollout_log_probs, and the rollout gave none: set "
                "actor.tis_cap=null"
            )
        assert not absent, f"the batch lacks {absent}"
        sums = MetricSums(self.device)
        skipped_before = self.guard.skipped_steps
        self.step_seconds = []
        profiled = min(1, self.config.ppo_epochs * len(minis) - 1)
        for epoch in range(self.config.ppo_epochs):
            for number in mini_batch_order(len(minis), epoch, self.config.shuffle):
                started = time.perf_counter()
                step = functools.partial(self._step, data, rows, minis[number], plan, columns, sums)
                if self.profile_path is not None and len(self.step_seconds) == profiled:
                    title = self._profile_title(data, rows.lengths[minis[number]], plan)
                    profile_call(step, self.profile_path, title, self.device, trace=True)
                    self.profile_path = None
                else:
                    step()
                self.step_seconds.append(time.perf_counter() - started)
        metrics = sums.reduce()
        metrics["actor/skipped_steps"] = float(self.guard.skipped_steps - skipped_before)
        metrics["perf/recomputed_layers/actor"] = float(self.memory.recomputed)
        if self.config.use_kl_loss:
            metrics["actor/kl_coef"] = float(self.config.kl_loss_coef)
        return metrics

    def _profile_title(self, data: DataProto, lengths: np.ndarray, plan: MicroBatchPlan) -> str:
        """What is about to be recorded: the next optimiser step, over rows of ``lengths`` tokens on this rank."""
        step = data.meta_info.get("global_steps")
        update = "an update" if step is None else f"the update of training step {step}"
        return (
            f"optimiser step {len(self.step_seconds) + 1} of {update}, rank {dist.get_rank()}: {len(lengths)} rows, "
            f"{int(lengths.sum()):,} tokens, {len(plan.split(lengths))} micro-batch(es)"
        )

    def _hint_once(self, rows: RaggedRows, minis: list[np.ndarray]) -> None:
        """Say, with the first update on a GPU, how micro-batches could be fuller."""
        hint = self.update_plan.hint(rows.lengths, minis) if self._may_hint else None
        self._may_hint = False
        if hint is not None:
            logger.warning(hint)

    def _step(
        self,
        data: DataProto,
        rows: RaggedRows,
        members: np.ndarray,
        plan: MicroBatchPlan,
        columns: list[str],
        sums: MetricSums,
    ) -> None:
        counts = token_and_row_counts(rows.mask[torch.from_numpy(members)]).to(self.device)
        dist.all_reduce(counts)
        tokens, row_count = counts.tolist()
        normalizer = LossNormalizer(
            self.config.loss_agg_mode, tokens, row_count, self.response_length or rows.width
        )
        total = torch.zeros((), device=self.device)
        self.guard.begin()
        for micro in micro_batches(data, rows, members, plan, columns, self.device):
            begin_micro_batch(self.actor_module, micro.last)
            with self.memory.measured(micro.packed.num_tokens, gathers=micro.first):
                loss = self._micro_loss(micro, normalizer, data.meta_info["temperature"], sums)
            (loss * dist.get_world_size()).backward()  # FSDP averages gradients over ranks
            total += loss.detach()
        dist.all_reduce(total)
        norm, _ = self.guard.step(total, on_skip=lambda: keep_skipped(data, members, "actor"))
        sums.end_step(actor__grad_norm=norm)

    def _micro_loss(
        self, micro: MicroBatch, normalizer: LossNormalizer, temperature: float, sums: MetricSums
    ) -> torch.Tensor:
        """This micro-batch's share of the mini-batch loss; adds its metrics to ``sums``."""
        config, mask = self.config, micro.mask
        with_entropy = config.entropy_coeff != 0
        flat = forward_log_probs(self.actor_module, micro.packed, temperature, with_entropy)
        log_prob, entropy = (micro.packed.scatter_response(x, micro.width) for x in flat)  # (rows, width)
        old = micro.columns["old_log_probs"]
        loss_fn = get_policy_loss_fn(config.policy_loss.loss_mode)
        output = loss_fn(old, log_prob, micro.columns["advantages"], mask, config)
        output = check_policy_loss_output(output, log_prob, config.policy_loss.loss_mode)
        if config.tis_cap is not None:
            rollout = micro.columns["rollout_log_probs"]
            output = apply_truncated_importance_sampling(output, old, rollout, mask, config.tis_cap)
        for name, (value, count) in output.metrics.items():
            sums.add(name, value, count)
        policy_loss = normalizer(output.loss, mask, output.agg_mode_override)
        loss = policy_loss
        sums.add_share("actor/pg_loss", policy_loss)
        if with_entropy:
            loss = loss - config.entropy_coeff * normalizer(entropy, mask)
            sums.add("actor/entropy", *metric_sum(entropy, mask))
        if config.use_kl_loss:
            kl = normalizer(kl_penalty(log_prob, micro.columns["ref_log_prob"], config.kl_loss_type), mask)
            loss = loss + config.kl_loss_coef * kl
            sums.add_share("actor/kl_loss", kl)
        return loss
