"""Supervised fine-tuning on packed rows with FSDP2; ``fsdp_sft_trainer`` is the command.

The loss of a step is the mean negative log-probability over all response tokens of its rows, on all ranks. Rows are
packed into micro-batches by a token budget; nothing is padded. Left out: sequence parallelism and sample weights.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from verl.models.build import ModelSpec, build_model
from verl.models.heads import forward_log_probs
from verl.models.lora import LoraSettings
from verl.models.micro_batches import split_by_tokens
from verl.models.packing import PackedRows, pack_rows
from verl.trainer.config.sft_schema import SFTConfig
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager, remove_old_checkpoints
from verl.utils.checkpoint.hf_export import export_model
from verl.utils.checkpoint.step_folder import TRACKER_FILE, find_checkpoint
from verl.utils.dataset.sft_dataset import SFTDataset
from verl.utils.fs import copy_to_local, write_atomically
from verl.utils.fsdp_utils import (
    SMALL_MODEL,
    ShardingOptions,
    begin_micro_batch,
    create_device_mesh,
    ensure_process_group,
    reshard,
    to_torch_dtype,
)
from verl.utils.logger.aggregate_logger import short_number
from verl.utils.lr_schedule import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from verl.utils.tokenizer import hf_tokenizer
from verl.utils.tracking import Tracking
from verl.workers.guarded_step import GuardedOptimizer

logger = logging.getLogger(__name__)

_EMPTY_ROW = (np.zeros(1, dtype=np.int32), np.zeros(0, dtype=np.int32))


class SFTTrainer:
    """One run. Every method is collective: all ranks call it alike."""

    def __init__(self, config: SFTConfig) -> None:
        self.config = config
        run = config.trainer
        self.device_type = run.device
        if self.device_type == "auto":
            self.device_type = "cuda" if torch.cuda.is_available() else "cpu"
        if self.device_type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        ensure_process_group(self.device_type)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device(self.device_type)
        self.folder = run.folder
        torch.manual_seed(run.seed + self.rank)

        self.tokenizer = self._load_tokenizer()
        self.train_data = self._dataset(config.data.train_files)
        self.val_data = self._dataset(config.data.val_files) if config.data.val_files else None
        batch = config.data.train_batch_size
        self.steps_per_epoch = -(-len(self.train_data) // batch)
        self.total_steps = run.total_training_steps or self.steps_per_epoch * run.total_epochs

        self.model = self._build_model()
        self._check_ids()
        self.optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad],
            lr=config.optim.lr,
            betas=tuple(config.optim.betas),
            weight_decay=config.optim.weight_decay,
            fused=self.device_type == "cuda",
        )
        self.guard = GuardedOptimizer(self.model, self.optimizer, config.optim.clip_grad)
        self.scheduler = self._build_scheduler()
        self.checkpoints = FSDPCheckpointManager(
            self.model,
            self.optimizer,
            self.scheduler,
            self.tokenizer,
            base_path=copy_to_local(config.model.path, key="model.path"),
        )
        self.global_step = 0

    # -- construction -------------------------------------------------------------------------------------------

    def _load_tokenizer(self) -> Any | None:
        model = self.config.model
        key = "model.tokenizer_path" if model.tokenizer_path else "model.path"
        folder = Path(copy_to_local(model.tokenizer_path or model.path, key=key))
        if not any(folder.glob("tokenizer*")):
            logger.info("%s has no tokenizer: rows must hold token ids", folder)
            return None
        return hf_tokenizer(str(folder), trust_remote_code=model.trust_remote_code)

    def _dataset(self, files: Any) -> SFTDataset:
        data = self.config.data
        return SFTDataset(
            files,
            self.tokenizer,
            prompt_key=data.prompt_key,
            response_key=data.response_key,
            max_length=data.max_length,
            truncation=data.truncation,
            apply_chat_template=data.apply_chat_template,
            append_eos=data.append_eos,
            loss_on_prompt=data.loss_on_prompt,
        )

    def _check_ids(self) -> None:
        """Raises ValueError where rows hold ids that the model does not have."""
        known = int(self.model.config.get_text_config().vocab_size)
        for key, data in (("data.train_files", self.train_data), ("data.val_files", self.val_data)):
            if data is not None and data.largest_id >= known:
                raise ValueError(
                    f"{key} holds the token id {data.largest_id}, and model.path={self.config.model.path} has the ids "
                    f"0 to {known - 1}: take rows made with its tokenizer, or model.tokenizer_path for text"
                )

    def _build_model(self) -> torch.nn.Module:
        model, on_cuda = self.config.model, self.device_type == "cuda"
        sharding = model.fsdp_config
        dtype = to_torch_dtype(sharding.model_dtype or ("bf16" if on_cuda else "fp32"))
        targets = model.target_modules
        lora = LoraSettings(model.lora_rank, model.lora_alpha, targets) if model.lora_rank > 0 else None
        spec = ModelSpec(
            path=copy_to_local(model.path, key="model.path"),
            override_config=model.override_config,
            random_init=model.random_init,
            seed=self.config.trainer.seed,
            gradient_checkpointing=model.enable_gradient_checkpointing,
            trust_remote_code=model.trust_remote_code,
            lora=lora,
        )
        options = ShardingOptions(
            param_dtype=dtype if dtype != torch.float32 else None,
            reduce_dtype=torch.float32 if dtype != torch.float32 else None,
            reshard_after_forward=sharding.reshard_after_forward and self.world_size > 1,
            compile_layers=model.torch_compile and on_cuda,
            whole_below=SMALL_MODEL,
        )
        mesh = create_device_mesh(self.world_size, sharding.fsdp_size, self.device_type)
        return build_model(spec, mesh, options)

    def _build_scheduler(self) -> LambdaLR:
        optim = self.config.optim
        warmup = int(optim.warmup_steps_ratio * self.total_steps)
        if optim.lr_scheduler == "constant":
            return get_constant_schedule_with_warmup(self.optimizer, warmup)
        return get_cosine_schedule_with_warmup(self.optimizer, warmup, self.total_steps, optim.min_lr_ratio)

    # -- data ---------------------------------------------------------------------------------------------------

    def _rows_of_step(self, step: int) -> np.ndarray:
        """This rank's row indices of optimiser step ``step`` (0-based): a function of seed and step alone."""
        epoch, position = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng((self.config.trainer.seed, epoch)).permutation(len(self.train_data))
        batch = self.config.data.train_batch_size
        rows = order[position * batch : (position + 1) * batch]
        # Longest first, dealt like cards there and back: token sums of the ranks stay close.
        rows = rows[np.argsort(-self.train_data.lengths[rows], kind="stable")]
        rank_of = np.arange(len(rows)) % (2 * self.world_size)
        return rows[np.minimum(rank_of, 2 * self.world_size - 1 - rank_of) == self.rank]

    def _micro_batches(self, data: SFTDataset, rows: np.ndarray) -> list[PackedRows]:
        """Packed micro-batches, as many on every rank (empty ones fill up)."""
        groups = split_by_tokens(data.lengths[rows].tolist(), self.config.data.max_token_len_per_gpu)
        count = torch.tensor(len(groups), device=self.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        groups += [[] for _ in range(int(count) - len(groups))]
        batches = []
        for group in groups:
            members = [data[int(rows[i])] for i in group] or [_EMPTY_ROW]
            batches.append(pack_rows(*zip(*members), device=self.device))
        return batches

    def _global_tokens(self, batches: list[PackedRows]) -> tuple[int, int]:
        """Response tokens and all tokens over all ranks."""
        counts = torch.tensor(
            [sum(len(b.labels) for b in batches), sum(b.num_tokens for b in batches)], device=self.device
        )
        dist.all_reduce(counts)
        learnt, seen = counts.tolist()
        return learnt, seen

    # -- the loop -----------------------------------------------------------------------------------------------

    def train_step(self) -> dict[str, float]:
        """One optimiser step; returns its metrics."""
        started = time.perf_counter()
        batches = self._micro_batches(self.train_data, self._rows_of_step(self.global_step))
        learnt, seen = self._global_tokens(batches)
        total = torch.zeros((), device=self.device)
        self.guard.begin()
        for number, packed in enumerate(batches, 1):
            begin_micro_batch(self.model, last=number == len(batches))
            log_probs, _ = forward_log_probs(self.model, packed, temperature=1.0, with_entropy=False)
            loss = -log_probs.sum() / learnt
            (loss * self.world_size).backward()  # FSDP averages gradients over ranks
            total += loss.detach()
        dist.all_reduce(total)
        lr = self.scheduler.get_last_lr()[0]
        norm, _ = self.guard.step(total)
        self.scheduler.step()
        self.global_step += 1
        seconds = time.perf_counter() - started
        return {
            "train/loss": float(total),
            "train/grad_norm": norm,
            "train/lr": lr,
            "train/skipped_steps": float(self.guard.skipped_steps),
            "perf/tokens_per_second": seen / seconds,
            "timing_s/step": seconds,
        }

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Mean negative log-probability over all response tokens of the validation rows, and its exponential."""
        assert self.val_data is not None
        self.model.eval()
        rows = np.arange(len(self.val_data))[self.rank :: self.world_size]
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for packed in self._micro_batches(self.val_data, rows):
            log_probs, _ = forward_log_probs(self.model, packed, temperature=1.0, with_entropy=False)
            sums += torch.stack([-log_probs.double().sum(), sums.new_tensor(len(packed.labels))])
        dist.all_reduce(sums)
        reshard(self.model)
        self.model.train()
        loss = float(sums[0] / sums[1])
        return {"val/loss": loss, "val/perplexity": float(np.exp(min(loss, 50.0)))}

    def fit(self) -> None:
        """Resume if there is something to resume, train to the end, export."""
        run = self.config.trainer
        self.resume()
        tracker = self._tracker()
        if self.global_step >= self.total_steps and self.rank == 0:
            logger.info("nothing left to train: step %d of %d is done", self.global_step, self.total_steps)
        while self.global_step < self.total_steps:
            metrics = self.train_step()
            last = self.global_step == self.total_steps
            if self.val_data is not None and (last or _due(self.global_step, run.test_freq)):
                metrics.update(self.validate())
            if (last and run.save_freq != 0) or _due(self.global_step, run.save_freq):
                self.save()
            if last or _due(self.global_step, run.log_freq) or "val/loss" in metrics:
                self._log(metrics, tracker)
        if tracker is not None:
            tracker.finish()
        self.export()

    def _tracker(self) -> Tracking | None:
        """What metrics go to, on rank 0: ``metrics.jsonl`` and the trackers. The console has lines of its own."""
        if self.rank:
            return None
        run = self.config.trainer
        backends = [name for name in ([run.logger] if isinstance(run.logger, str) else run.logger) if name != "console"]
        config, step = self.config.to_dict(), self.global_step
        return Tracking(run.project_name, run.experiment_name, backends, config, self.folder, resume_step=step)

    def _log(self, metrics: dict[str, float], tracker: Tracking | None) -> None:
        if tracker is None:
            return
        shown = " - ".join(f"{key}:{short_number(value)}" for key, value in metrics.items())
        logger.info("step:%d/%d - %s", self.global_step, self.total_steps, shown)
        tracker.log({"epoch": self.global_step / self.steps_per_epoch, **metrics}, step=self.global_step)

    # -- files --------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint of the current step and name it the newest; only then do older ones go."""
        path = self.folder / f"global_step_{self.global_step}" / "model"
        self.checkpoints.save_checkpoint(str(path), global_step=self.global_step)
        if self.rank == 0:
            write_atomically(self.folder / TRACKER_FILE, str(self.global_step))
            if (keep := self.config.trainer.max_ckpt_to_keep) is not None:
                remove_old_checkpoints(path, keep)

    def resume(self) -> None:
        """Continue from the newest checkpoint of this run's folder, if there is one and it is wanted.

        Raises:
            ValueError: the checkpoint is missing or cannot be read.
        """
        folder = find_checkpoint(self.config.trainer.resume_mode, None, self.folder)
        if folder is None:
            return
        self.global_step = self.checkpoints.load_checkpoint(str(folder / "model"))
        logger.info("resumed from %s: step %d of %d", folder, self.global_step, self.total_steps)

    def export(self) -> None:
        """Write the trained model as a Hugging Face folder."""
        run = self.config.trainer
        name = run.export_dtype or ("bf16" if self.device_type == "cuda" else "fp32")
        folder = Path(run.export_dir).expanduser() if run.export_dir else self.folder / "huggingface"
        export_model(self.model, folder, self.tokenizer, to_torch_dtype(name))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
