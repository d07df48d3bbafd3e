"""Where a batch shell becomes rows: the policy plays the environments."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from ray.exceptions import RayError

from agent_system.environments.base import EventEnvironments
from agent_system.environments.contract import checked_success
from agent_system.multi_turn_rollout import reference_form
from agent_system.multi_turn_rollout.episode import Episode
from agent_system.multi_turn_rollout.episode_loop import EpisodeLoop, RolloutPlan
from agent_system.multi_turn_rollout.generation import GenerationClient, as_generation_client
from agent_system.multi_turn_rollout.groups import Group, carried_on
from agent_system.multi_turn_rollout.lock_step import LockStepAdapter, as_event_environments
from agent_system.multi_turn_rollout.prompt_encoder import PromptEncoder
from agent_system.multi_turn_rollout.rows import build_rows
from agent_system.multi_turn_rollout.scheduler import ReplicaScheduler
from verl.protocol import DataProto
from verl.single_controller.ray import WorkerError
from verl.trainer.config.group_size import train_group_size, val_group_size
from verl.workers.rollout.settings import sampling_settings

logger = logging.getLogger(__name__)


class TrajectoryCollector:
    """Collects episodes for training and validation.

    Args:
        config: the run's configuration.
        tokenizer: of the policy, with a chat template.
        processor: of images; text environments need none.
    """

    def __init__(self, config: Any, tokenizer: Any, processor: Any = None) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.processor = processor
        self._encoder = PromptEncoder(
            tokenizer,
            config.data.max_prompt_length,
            config.data.truncation,
            config.data.apply_chat_template_kwargs,
            config.env.history_length,
        )
        self._carried: list[Group] = []  # surplus groups of the last training rollout

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: the groups that the next training rollout starts with."""
        return {"carried": list(self._carried)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with carried groups; they are dropped, with a warning, if this run carries none or has no room."""
        filters, carried = self.config.algorithm.filter_groups, list(state["carried"])
        carries = filters.enable and filters.surplus == "carry"
        if carried and not (carries and len(carried) < self.config.data.train_batch_size):
            logger.warning("%d groups carried by the checkpoint are dropped: algorithm.filter_groups", len(carried))
            carried = []
        self._carried = carried

    def multi_turn_loop(
        self, gen_batch: DataProto, actor_rollout_wg: Any, envs: Any, is_train: bool = True
    ) -> DataProto:
        """Plays one batch of episodes to their end.

        Args:
            gen_batch: one row per task in training (each is played ``env.rollout.n`` times, and once more greedily for
                ReMax), one per episode in validation. Its ``data_source`` and ``env_kwargs`` columns are used where
                they are present, and of its ``meta_info`` ``global_steps`` (seeds in training), ``batch_index`` (which
                block of the validation tasks), ``num_batches`` (how many blocks there are) and ``do_sample``.
            actor_rollout_wg: the worker group with the engines, or any ``GenerationClient``.
            envs: an environment manager, event-driven or lock-step.
            is_train: training or validation.

        Returns:
            Rows ordered by episode and step, see ``build_rows``. ``meta_info["rollout_metrics"]`` holds ``rollout/*``;
            after a validation ``meta_info["failed_without_rows"]`` has ``(task_id, data_source)`` of the episodes
            without a step: their first prompt did not fit, or they were over at their reset.

        Raises:
            ValueError: the batch does not fit the environments, or a prompt is too long and must not be cut.
            RuntimeError: no episode came through.
        """
        repeat = train_group_size(self.config) if is_train else 1
        return self._play(gen_batch, actor_rollout_wg, envs, is_train, repeat)

    def _play(
        self, gen_batch: DataProto, actor_rollout_wg: Any, envs: Any, is_train: bool, repeat: int, replace: bool = True
    ) -> DataProto:
        """As ``multi_turn_loop`` with every row of the batch played ``repeat`` times; ``replace`` allows new groups."""
        num_episodes = len(gen_batch) * repeat
        data = self.config.data
        group_size = train_group_size(self.config) if is_train else val_group_size(self.config)
        capacity = group_size * ((data.gen_batch_size or data.train_batch_size) if is_train else data.val_batch_size)
        environments = as_event_environments(envs, num_episodes, group_size, capacity)
        plan = self._plan(gen_batch, environments, num_episodes, repeat, is_train, replace)
        client = as_generation_client(actor_rollout_wg)
        engine_metrics = client.begin()
        scheduler = ReplicaScheduler(
            client, self.config.actor_rollout_ref.rollout.max_steps_per_slice, self.config.trainer.step_timeout
        )
        loop = EpisodeLoop(plan, environments, scheduler, self._encoder, self.tokenizer)
        self._encoder.shortened = 0
        self._run(loop, client)
        engine_metrics |= client.end()
        groups = self._with_carried(loop, plan, _column(gen_batch, "data_source", repeat))
        engine_metrics["rollout/groups_carried"] = float(len(groups) - len(loop.choice.kept()))
        counted = [episode for members in groups for episode in members if episode.counts]
        if not counted:
            reasons = "; ".join(loop.counts.failures[:3]) or "every first prompt exceeds data.max_prompt_length"
            raise RuntimeError(f"none of the {num_episodes} episodes of {plan.label} came through: {reasons}")
        meta = {
            "temperature": plan.sampling.temperature,
            "eos_token_id": self.tokenizer.eos_token_id,
            "pad_token_id": self.tokenizer.pad_token_id,
            "rollout_metrics": self._metrics(loop, scheduler, client) | engine_metrics,
        }
        if not is_train:
            meta["failed_without_rows"] = [
                (episode.task_id, episode.data_source)
                for members in groups
                for episode in members
                if not episode.turns and not episode.infra_failed
            ]
        return build_rows(counted, _success(environments, counted), self.tokenizer.pad_token_id, meta)

    # ------------------------------------------------------------------ verl-agent's own steps, in padded form

    def preprocess_single_sample(self, item: int, gen_batch: DataProto, obs: dict[str, Any]) -> dict[str, Any]:
        """Observation ``item`` as a padded prompt; see ``reference_form.preprocess_sample``."""
        pad = self.tokenizer.pad_token_id
        return reference_form.preprocess_sample(self._encoder, self.config, pad, item, gen_batch, obs)

    def preprocess_batch(self, gen_batch: DataProto, obs: dict[str, Any]) -> DataProto:
        """All observations as padded prompts."""
        samples = [self.preprocess_single_sample(item, gen_batch, obs) for item in range(len(gen_batch))]
        batch = reference_form.collate(samples)
        batch.meta_info = gen_batch.meta_info
        return batch

    def vanilla_multi_turn_loop(self, gen_batch: DataProto, actor_rollout_wg: Any, envs: Any) -> reference_form.Rollout:
        """Plays every row of ``gen_batch`` once (the caller repeats them); keeps every group."""
        return self._padded_rollout(gen_batch, actor_rollout_wg, envs, replace=False)

    def dynamic_multi_turn_loop(self, gen_batch: DataProto, actor_rollout_wg: Any, envs: Any) -> reference_form.Rollout:
        """As ``vanilla_multi_turn_loop``, replacing groups whose rewards are all equal."""
        return self._padded_rollout(gen_batch, actor_rollout_wg, envs, replace=True)

    def gather_rollout_data(
        self,
        total_batch_list: list[list[dict[str, Any]]],
        episode_rewards: np.ndarray,
        episode_lengths: np.ndarray,
        success: dict[str, np.ndarray],
        traj_uid: np.ndarray,
        tool_callings: np.ndarray,
    ) -> DataProto:
        """The rows of a rollout as one padded batch; see ``reference_form.gather``."""
        return reference_form.gather(
            total_batch_list, episode_rewards, episode_lengths, success, traj_uid, tool_callings
        )

    def _padded_rollout(
        self, gen_batch: DataProto, actor_rollout_wg: Any, envs: Any, replace: bool
    ) -> reference_form.Rollout:
        is_train = not gen_batch.meta_info.get("validate", False)
        rows = self._play(gen_batch, actor_rollout_wg, envs, is_train, repeat=1, replace=replace)
        data = self.config.data
        padded = reference_form.padded_rows(
            rows, data.max_prompt_length, data.max_response_length, self.tokenizer.pad_token_id
        )
        return reference_form.as_rollout(padded)

    # ------------------------------------------------------------------ parts

    @staticmethod
    def _run(loop: EpisodeLoop, client: GenerationClient) -> None:
        """Runs ``loop``; engines that still answer are left as after a rollout when it is broken off."""
        try:
            loop.run()
        except (RayError, WorkerError, TimeoutError):
            raise
        except BaseException:
            client.end()
            raise

    @property
    def _plays_baselines(self) -> bool:
        return self.config.algorithm.adv_estimator == "remax"

    def _with_carried(self, loop: EpisodeLoop, plan: RolloutPlan, sources: Sequence[Any] | None) -> list[Group]:
        """The groups of the batch: those carried from the last rollout and those of ``loop``; keeps its surplus."""
        kept, surplus = loop.choice.kept(), loop.choice.surplus()
        for episode in (episode for members in kept + surplus for episode in members):
            episode.data_source = "unknown" if sources is None else str(sources[episode.slot])
        if plan.most_groups is None:
            return kept
        carries = self.config.algorithm.filter_groups.surplus == "carry"
        groups, self._carried = self._carried + kept, carried_on(surplus) if carries else []
        return groups

    def _plan(
        self,
        gen_batch: DataProto,
        envs: EventEnvironments,
        num_episodes: int,
        repeat: int,
        is_train: bool,
        replace: bool,
    ) -> RolloutPlan:
        if num_episodes > envs.num_episodes or num_episodes % envs.group_size:
            key = "data.train_batch_size × env.rollout.n" if is_train else "data.val_batch_size × val_kwargs.n"
            if is_train and self._plays_baselines:
                key = "data.train_batch_size × (env.rollout.n + 1, as ReMax plays a greedy episode of each task)"
            raise ValueError(
                f"the batch asks for {num_episodes} episodes, the environment has {envs.num_episodes} in groups of "
                f"{envs.group_size}: {key} must be the number of its episodes"
            )
        config, meta = self.config, gen_batch.meta_info
        step, block = int(meta.get("global_steps", 0)), int(meta.get("batch_index", 0))
        run_seed = config.actor_rollout_ref.rollout.seed
        filters = config.algorithm.filter_groups
        filtering = is_train and replace and filters.enable
        groups, carried = num_episodes // envs.group_size, len(self._carried) if filtering else 0
        rollout, judge = config.actor_rollout_ref.rollout, config.reward_model
        return RolloutPlan(
            name=f"step{step}" if is_train else f"val{block}",
            # validation draws the same numbers at every evaluation, so that two evaluations compare in pairs
            seed_parts=(run_seed, "train", step) if is_train else (run_seed, "val", block),
            num_groups=groups - carried,
            wanted=(min(groups, config.data.train_batch_size) if filtering else groups) - carried,
            most_groups=filters.max_num_gen_batches * groups if filtering else None,
            baseline=(
                sampling_settings(rollout, validate=False, do_sample=False)
                if is_train and self._plays_baselines
                else None
            ),
            max_turns=config.env.max_steps,
            sampling=sampling_settings(rollout, validate=not is_train, do_sample=meta.get("do_sample", True)),
            env_kwargs=_column(gen_batch, "env_kwargs", repeat),
            keep_prompts=is_train and judge.enable and judge.model.input_tokenizer is not None,
            block=block,
            # a session has its own limit where it runs; this one is for a process that does not answer at all
            reply_limit_s=2 * max(config.env.reset_timeout, config.env.step_timeout),
            progress_bar=config.trainer.progress_bar,
            label=f"step{step}" if is_train else _validation_label(block, int(meta.get("num_batches", 1))),
        )

    def _metrics(self, loop: EpisodeLoop, scheduler: ReplicaScheduler, client: GenerationClient) -> dict[str, float]:
        counts, engine = loop.counts, scheduler.counts
        capacity = max(counts.seconds * client.num_replicas, 1e-9)
        return {
            "rollout/episodes": float(counts.episodes),
            "rollout/infra_failed": float(counts.infra_failed),
            "rollout/infra_retried": float(counts.infra_retried),
            "rollout/prompt_overflow": float(counts.prompt_overflow),
            "rollout/prompts_shortened": float(self._encoder.shortened),
            "rollout/requests": float(engine.requests),
            "rollout/slices": float(engine.slices),
            "rollout/tokens": float(engine.generated_tokens),
            "rollout/prompt_tokens": float(engine.prompt_tokens),
            "rollout/seconds": counts.seconds,
            "rollout/tokens_per_second": engine.generated_tokens / max(counts.seconds, 1e-9),
            "rollout/engine_idle_share": max(0.0, 1.0 - engine.busy_s / capacity),
            "rollout/env_wait_s": counts.env_only_wait_s,
        } | loop.choice.metrics()


def _success(envs: EventEnvironments, episodes: Sequence[Episode]) -> dict[str, np.ndarray]:
    """What the environment's manager counts as success, for each of ``episodes``."""
    manager = envs.manager if isinstance(envs, LockStepAdapter) else envs
    figures = manager.success_evaluator(
        total_infos=[[turn.info for turn in episode.turns] for episode in episodes],
        total_batch_list=[[{"active_masks": True} for _ in episode.turns] for episode in episodes],
        episode_rewards=np.array([episode.reward for episode in episodes], dtype=np.float32),
        episode_lengths=np.array([len(episode.turns) for episode in episodes], dtype=np.float32),
    )
    return checked_success(manager, figures, len(episodes))


def _validation_label(block: int, blocks: int) -> str:
    """How block ``block``, from 0, of a validation's tasks is called where a user reads it.

    >>> _validation_label(0, 1), _validation_label(1, 3)
    ('validation', 'validation 2 of 3')
    """
    return "validation" if blocks == 1 else f"validation {block + 1} of {blocks}"


def _column(batch: DataProto, key: str, repeat: int) -> list[Any] | None:
    """Column ``key`` with every value ``repeat`` times in a row; None if the batch has none."""
    values = batch.non_tensor_batch.get(key)
    return None if values is None else [value for value in values for _ in range(repeat)]
