"""PPO-family training of an agent: the driver's loop.

``RayPPOTrainer.fit`` is one training step on one screen: roll out, returns, reward, log-probabilities, advantages,
update, log. What a phase does lies in the module its name says: rows over ranks in ``batching``, estimators in
``advantage``, validation in ``validation``, saving and resuming in ``checkpointed_trainer``.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_system.multi_turn_rollout import TrajectoryCollector
from gigpo.core_gigpo import compute_step_discounted_returns
from verl.protocol import DataProto
from verl.trainer.config import PPOTrainerConfig, pin_split
from verl.trainer.config.group_size import val_group_size
from verl.trainer.ppo import dumps
from verl.trainer.ppo.advantage import (
    AdvantageEstimator,
    apply_invalid_action_penalty,
    apply_kl_penalty,
    compute_advantage,
    compute_response_mask,
)
from verl.trainer.ppo.batching import arrange_rows, balance_metrics, concat_rows, row_lengths, without_filler
from verl.trainer.ppo.checkpointed_trainer import CheckpointedTrainer
from verl.trainer.ppo.core_algos import get_kl_controller
from verl.trainer.ppo.dataloaders import create_dataloaders
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
)
from verl.trainer.ppo.rank_failure import interrupted_by_failure
from verl.trainer.ppo.resources import ResourcePoolManager, Role, StartingRanks, start_ranks
from verl.trainer.ppo.resume_point import checkpoint_root
from verl.trainer.ppo.reward import RewardFunction, compute_reward
from verl.trainer.ppo.rollout_check import keep_behaviour_of_carried_rows, rollout_gap_metrics
from verl.trainer.ppo.run_record import begin_record, keep_record
from verl.trainer.ppo.scoring import score_rows
from verl.trainer.ppo.termination import TerminationGuard, end_all
from verl.trainer.ppo.timing import StartupLedger, StepTimer
from verl.trainer.ppo.trainer_checkpoint import TrainerState
from verl.trainer.ppo.validation import closing_line, success_by_task, validation_metrics
from verl.utils.process_sessions import children_in_own_sessions
from verl.utils.progress import reported
from verl.utils.tracking import Tracking

if TYPE_CHECKING:
    import ray

    from verl.single_controller.ray import RayWorkerGroup

logger = logging.getLogger(__name__)

__all__ = [
    "AdvantageEstimator",
    "RayPPOTrainer",
    "ResourcePoolManager",
    "Role",
    "apply_invalid_action_penalty",
    "apply_kl_penalty",
    "compute_advantage",
    "compute_response_mask",
]


class RayPPOTrainer(CheckpointedTrainer):
    """Owns the worker groups, the environments and the loop.

    Args:
        config: the validated configuration.
        tokenizer: of the policy.
        role_worker_mapping: worker class of each role.
        resource_pool_manager: the ranks.
        train_dataset, val_dataset, collate_fn, train_sampler: the shells that say how many tasks a batch has.
        reward_fn, val_reward_fn: rows to token-level scores, in training and in validation.
        traj_collector: turns a batch shell into rows by letting the policy act.
        make_envs: builds ``(envs, val_envs)``; called while the ranks load their models.
        processor: of images, kept for who asks the trainer for it; nothing here reads images.
        ranks: ranks that start already; by default ``init_workers`` starts them. The trainer ends them.
        startup: seconds of what was done before.
    """

    def __init__(
        self,
        config: PPOTrainerConfig,
        tokenizer: Any,
        role_worker_mapping: dict[Role, Any],
        resource_pool_manager: ResourcePoolManager,
        train_dataset: Any,
        val_dataset: Any,
        collate_fn: Callable[[list[dict[str, Any]]], dict[str, Any]],
        train_sampler: Any,
        reward_fn: RewardFunction,
        val_reward_fn: RewardFunction,
        traj_collector: TrajectoryCollector,
        make_envs: Callable[[], tuple[Any, Any]],
        processor: Any = None,
        ranks: StartingRanks | None = None,
        startup: StartupLedger | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.processor = processor
        self.role_worker_mapping = role_worker_mapping
        self.resource_pool_manager = resource_pool_manager
        self.reward_fn = reward_fn
        self.val_reward_fn = val_reward_fn
        self.traj_collector = traj_collector
        self._make_envs = make_envs
        self.use_critic = config.uses_critic
        self.use_reference_policy = config.uses_reference
        self.kl_ctrl_in_reward = (
            get_kl_controller(config.algorithm.kl_ctrl) if config.algorithm.use_kl_in_reward else None
        )
        self.world_size = resource_pool_manager.get_n_gpus()
        self.global_steps = 0
        self.startup: StartupLedger | None = startup or StartupLedger()
        self._ranks = ranks
        self.worker_group = ranks.root if ranks is not None else None
        self.checkpoint_root = checkpoint_root(config)
        self.run_dir = Path(config.trainer.run_dir).expanduser().absolute()
        self.train_dataloader, self.val_dataloader = create_dataloaders(
            config.data, train_dataset, val_dataset, collate_fn, train_sampler
        )
        steps = config.trainer.total_training_steps
        self.total_training_steps = steps or len(self.train_dataloader) * config.trainer.total_epochs

    # ------------------------------------------------------------------ set-up

    def init_workers(self) -> None:
        """Have the ranks load the models, as soon as they have started, and build the environments meanwhile.

        Raises:
            WorkerError: a rank failed to start or to load; raised at once, whatever the driver is building.
        """
        assert self.startup is not None, "ranks start once"
        if self._ranks is None:
            self._ranks = start_ranks(
                self.config, self.role_worker_mapping, self.resource_pool_manager, self.use_critic
            )
            self.worker_group = self._ranks.root
            self.startup.mark("ranks_asked")
        self.startup.mark("driver")
        groups = self._ranks.groups()
        self.actor_rollout_wg, self.critic_wg, self.rm_wg = groups.actor_rollout, groups.critic, groups.reward_model
        ranks, loading = list(range(self.world_size)), []
        # the actor last, so that its engine sees what memory the others leave
        for group in filter(None, (self.critic_wg, self.rm_wg, self.actor_rollout_wg)):
            loading.append((group, group.execute_ranks_async(ranks, "init_model", self.total_training_steps)))
        calls = [*self._ranks.warming_up, *chain.from_iterable(refs for _, refs in loading)]
        building = self.startup.part("environments", "building the environments")
        with building, interrupted_by_failure(calls, lambda: self._wait_until_loaded(loading)):
            self.envs, self.val_envs = self._make_envs()
        self._wait_until_loaded(loading)

    def _wait_until_loaded(self, loading: list[tuple[RayWorkerGroup, list[ray.ObjectRef]]]) -> None:
        limit = self.config.trainer.start_timeout
        with self.startup.part("waiting_for_ranks", "waiting for ranks to load the model"):
            self.startup.add(self._ranks.wait(timeout=limit))
            for group, refs in loading:
                reports = group.get(refs, method="init_model", timeout=limit, key="trainer.start_timeout")
                self.startup.add(reports)

    # ------------------------------------------------------------------ the loop

    def fit(self) -> dict[str, float]:
        """Train until ``total_training_steps``; returns the metrics of the last validation (empty without one)."""
        assert self.startup is not None, "training starts once"
        with reported("start: looking for a checkpoint and loading it", self.config.trainer.progress_bar):
            self._load_checkpoint()
        self.config = pin_split(self.config, self._split_digest())
        dumps.claim_run_folder(self.run_dir, self.global_steps, self.config.trainer.val_only)
        begin_record(self.config, self.global_steps)
        probes = self.actor_rollout_wg.execute_all_async("probe")  # trackers start meanwhile, which can take seconds
        with self.startup.part("trackers", "starting trackers"):
            self.tracker = Tracking.for_run(self.config, resume_step=self.global_steps, state=self._tracker_state)
        try:
            return self._train(probes)
        finally:
            self.tracker.finish()

    def _train(self, probes: list[ray.ObjectRef]) -> dict[str, float]:
        first_val: dict[str, float] = {}
        last_val: dict[str, float] = {}
        first_step = self.global_steps
        assert self.startup is not None, "training starts once"
        with self.startup.part("probe", "comparing engine and trainer"):
            self._verify_weight_sync(probes)
        self.startup.mark("ready")
        logger.info("seconds of the start-up: %s", self.startup)
        if self.config.trainer.val_before_train and self.val_envs is not None:
            first_val = last_val = self._validate()
            self.tracker.log(last_val, step=self.global_steps)
            if self.config.trainer.val_only:
                logger.info(closing_line(self.global_steps, 0, last_val, self.config.trainer.run_dir))
                return last_val
        with TerminationGuard() as guard:
            for state_before, shell in self._batches():
                self.global_steps += 1
                is_last = self.global_steps >= self.total_training_steps
                timer, metrics = StepTimer(f"step {self.global_steps}", self.config.trainer.progress_bar), {}
                with guard.interruptible():
                    guard.drop_if_requested()  # while the batch was read
                    with timer.phase("gen", has_bar=True):
                        rows = self._roll_out(shell, metrics)
                    rows = self._score(rows, timer, metrics)
                    rows = self._arrange(rows, metrics)
                    rows = self._add_log_probs(rows, timer, metrics)
                    rows = self._add_advantages(rows, timer, metrics)
                if guard.requested:
                    self.global_steps -= 1
                    self._save_checkpoint(state_before)
                    break
                self._update(rows, timer, metrics)
                rows = without_filler(rows)
                with timer.phase("dump_rollout_generations"):
                    dumps.write_rollout(self.config.trainer.rollout_data_dir, rows, self.tokenizer, self.global_steps)
                if self._due(self.config.trainer.test_freq, is_last) and not guard.requested:
                    with timer.phase("testing", has_bar=True):
                        last_val = self._validate()
                    metrics.update(last_val)
                if self._due(self.config.trainer.save_freq, is_last) or guard.requested:
                    with timer.phase("save_checkpoint"):
                        self._save_checkpoint(self._trainer_state(self.global_steps))
                self._log_step(rows, timer, metrics)
                if is_last or guard.requested:
                    break
        guard.raise_if_requested(self.global_steps, self.checkpoint_root)
        trained = self.global_steps - first_step
        final = {} if trained and last_val is first_val else last_val  # the first one says nothing of what was trained
        kept = self._kept() if trained else ""
        logger.info(closing_line(self.global_steps, trained, final, self.config.trainer.run_dir, kept))
        return last_val

    def _batches(self) -> Iterator[tuple[TrainerState, DataProto]]:
        """Batch shells until the last step, epoch after epoch (a resumed loader goes on where it stood).

        With each comes the state from before it was fetched: what a checkpoint holds if its step is dropped.
        """
        while self.global_steps < self.total_training_steps:
            with children_in_own_sessions():  # a SIGTERM to the group would end them, and that would raise here
                batches = iter(self.train_dataloader)
            state = self._trainer_state(self.global_steps)
            for batch in batches:
                yield state, DataProto.from_single_dict(batch)
                if self.global_steps >= self.total_training_steps:
                    return
                state = self._trainer_state(self.global_steps)

    def _due(self, frequency: int, is_last: bool) -> bool:
        return frequency > 0 and (is_last or self.global_steps % frequency == 0)

    # ------------------------------------------------------------------ the phases of a step

    def _roll_out(self, shell: DataProto, metrics: dict[str, float]) -> DataProto:
        shell.meta_info.update(global_steps=self.global_steps, validate=False, do_sample=True)
        rows = self.traj_collector.multi_turn_loop(shell, self.actor_rollout_wg, self.envs, is_train=True)
        metrics.update(rows.meta_info.pop("rollout_metrics", {}))
        rows.batch["step_rewards"] = compute_step_discounted_returns(rows, self.config.algorithm.gamma)
        return rows

    def _score(self, rows: DataProto, timer: StepTimer, metrics: dict[str, float]) -> DataProto:
        with timer.phase("reward"):
            rows, reward_metrics = score_rows(rows, self.reward_fn, self.config, self.rm_wg)
        metrics.update(reward_metrics)
        return rows

    def _arrange(self, rows: DataProto, metrics: dict[str, float]) -> DataProto:
        natural = row_lengths(rows)
        rows.meta_info["global_token_num"] = natural.tolist()
        rows = arrange_rows(
            rows,
            mini_batch_size=self.config.actor_rollout_ref.actor.ppo_mini_batch_size,
            world_size=self.world_size,
            pad_token_id=self.tokenizer.pad_token_id,
            seed=(self.config.data.seed, self.global_steps),
            balance=self.config.trainer.balance_batch,
        )
        metrics.update(balance_metrics(natural, rows, self.world_size))
        return rows

    def _add_log_probs(self, rows: DataProto, timer: StepTimer, metrics: dict[str, float]) -> DataProto:
        inputs = rows.select(
            batch_keys=["responses", "response_mask", "prompt_length", "mini_batch"],
            non_tensor_batch_keys=["prompt_ids"],
        )
        with timer.phase("old_log_prob"):
            output = self.actor_rollout_wg.compute_log_prob(inputs)
            mask = rows.batch["response_mask"]
            entropys = output.batch.pop("entropys")
            metrics["actor/entropy_loss"] = float((entropys * mask).sum() / mask.sum())
            rows.batch["old_log_probs"] = output.batch["old_log_probs"]
            metrics.update(rollout_gap_metrics(rows))
            keep_behaviour_of_carried_rows(rows)
        if self.use_reference_policy:
            with timer.phase("ref"):
                output = self.actor_rollout_wg.compute_ref_log_prob(inputs)
                rows.batch["ref_log_prob"] = output.batch["ref_log_prob"]
        if self.critic_wg is not None:
            with timer.phase("values"):
                rows.batch["values"] = self.critic_wg.compute_values(inputs).batch["values"]
        return rows

    def _add_advantages(self, rows: DataProto, timer: StepTimer, metrics: dict[str, float]) -> DataProto:
        with timer.phase("adv"):
            if self.kl_ctrl_in_reward is not None:
                rows, kl_metrics = apply_kl_penalty(rows, self.kl_ctrl_in_reward, self.config.algorithm.kl_penalty)
                metrics.update(kl_metrics)
            else:
                rows.batch["token_level_rewards"] = rows.batch["token_level_scores"].clone()
            rows = compute_advantage(rows, self.config.algorithm)
            metrics.update(rows.meta_info.pop("advantage_metrics", {}))
        return rows

    def _update(self, rows: DataProto, timer: StepTimer, metrics: dict[str, float]) -> None:
        keys = ["responses", "response_mask", "prompt_length", "mini_batch", "old_log_probs", "advantages"]
        optional = ["ref_log_prob", "rollout_log_probs", "returns", "values"]
        inputs = rows.select(
            batch_keys=keys + [key for key in optional if key in rows.batch.keys()],
            non_tensor_batch_keys=["prompt_ids"],
            meta_info_keys=["global_token_num"],
        )
        inputs.meta_info.update(global_steps=self.global_steps, skipped_dir=str(self.checkpoint_root / "nonfinite"))
        if self.critic_wg is not None:
            with timer.phase("update_critic"):
                metrics.update(self.critic_wg.update_critic(inputs).meta_info["metrics"])
        if self.config.trainer.critic_warmup <= self.global_steps:
            profile_dir = self.checkpoint_root / "profile" / f"step_{self.global_steps}"
            profiled = self.global_steps in (self.config.trainer.profile_steps or ())
            if profiled:
                inputs.meta_info["profile_dir"] = str(profile_dir)
            with timer.phase("update_actor"):
                metrics.update(self.actor_rollout_wg.update_actor(inputs).meta_info["metrics"])
            if profiled and profile_dir.is_dir():  # a rank that could not write has said so
                logger.info("profile of step %d's update: %s", self.global_steps, profile_dir)

    def _log_step(self, rows: DataProto, timer: StepTimer, metrics: dict[str, float]) -> None:
        seconds = timer.finish()
        metrics["training/global_step"] = self.global_steps
        metrics["training/epoch"] = (self.global_steps - 1) // len(self.train_dataloader)
        data = self.config.data
        metrics.update(
            compute_data_metrics(rows, self.use_critic, data.max_prompt_length, data.max_response_length)
        )
        metrics.update(compute_timing_metrics(batch=rows, timing_raw=seconds))
        metrics.update(compute_throughout_metrics(batch=rows, timing_raw=seconds, n_gpus=self.world_size))
        if self.startup is not None:
            self.startup.mark("first_step_done")
            metrics.update(self.startup.seconds())
            self.startup = None
            keep_record(self.config)
        self.tracker.log(metrics, step=self.global_steps)

    # ------------------------------------------------------------------ validation

    def _validate(self) -> dict[str, float]:
        """Play every validation task once; ``val/*`` metrics, and the per-task results beside the run."""
        parts: list[DataProto] = []
        failed: list[tuple[str, str]] = []  # episodes that have no rows
        for index, batch in enumerate(self.val_dataloader):
            shell = DataProto.from_single_dict(batch)
            shell = shell.repeat(val_group_size(self.config), interleave=True)
            shell.meta_info.update(
                global_steps=self.global_steps,
                validate=True,
                do_sample=self.config.actor_rollout_ref.rollout.val_kwargs.do_sample,
                batch_index=index,
                num_batches=len(self.val_dataloader),
            )
            rows = self.traj_collector.multi_turn_loop(shell, self.actor_rollout_wg, self.val_envs, is_train=False)
            rows.meta_info.pop("rollout_metrics", None)
            failed += rows.meta_info.pop("failed_without_rows", [])
            parts.append(rows)
        rows = concat_rows(parts)
        rows.batch["token_level_scores"], _ = compute_reward(rows, self.val_reward_fn)
        dumps.write_rollout(self.config.trainer.validation_data_dir, rows, self.tokenizer, self.global_steps)
        metrics = validation_metrics(rows, rows.batch["token_level_scores"].sum(-1).numpy(), failed)
        digest = self._split_digest()
        dumps.write_validation(self.run_dir, success_by_task(rows, failed), metrics, self.global_steps, digest)
        samples = dumps.samples(rows, self.tokenizer, self.config.trainer.log_val_generations)
        self.tracker.log_generations(samples, step=self.global_steps)
        return metrics

    def _verify_weight_sync(self, probes: list[ray.ObjectRef]) -> None:
        """Stop before the first step if engine and trainer do not compute the same model."""
        report = self.actor_rollout_wg.get(probes, method="probe")[0]
        gaps = report["rollout/probe_gap_mean"], report["rollout/probe_gap_max"]
        logger.info("engine and trainer differ by %.2g in the mean and %.2g at most in log-probabilities", *gaps)

    # ------------------------------------------------------------------ the end

    def shutdown(self) -> None:
        """End the environments and the ranks; safe to call at any point of the set-up."""
        end_all(self, {"envs": "close", "val_envs": "close", "worker_group": "shutdown"})
