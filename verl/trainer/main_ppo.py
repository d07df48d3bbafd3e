"""Entry point of training: compose, validate, start, run.

::

    python -m verl.trainer.main_ppo actor_rollout_ref.model.path=… data.train_batch_size=16 …

The driver is this process; models live in Ray workers, one per rank. What takes seconds to import (torch, the trainer,
the environments) is imported after the ranks were asked for, while they start.
"""
from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from verl.trainer.config import ConfigError, PPOTrainerConfig, hydra_main, prepare_config
from verl.trainer.config.derived import known_total_steps
from verl.trainer.config.earlier_run import changed_values
from verl.trainer.config.failure import noted
from verl.trainer.config.machine import visible_gpus
from verl.trainer.ppo.rank_failure import interrupted_by_failure
from verl.trainer.ppo.resume_point import nothing_left
from verl.trainer.ppo.termination import StopSignals, undisturbed
from verl.trainer.ppo.timing import StartupLedger
from verl.utils.bytecode import keep_bytecode
from verl.utils.long_lived import made_to_stay
from verl.utils.progress import reported
from verl.utils.rank_log import OWN_LINE

if TYPE_CHECKING:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.trainer.ppo.resources import StartingRanks

logger = logging.getLogger(__name__)

# Ray's own settings, for a local Ray.
RAY_SETTINGS = {
    # By default it starts a Python process for every CPU at once, which would lie idle: ranks have an environment of
    # their own and so start processes of their own. All of them would import at the same time.
    "RAY_prestart_worker_first_driver": "0",
    # The raylet often looks for the socket of its own object store just before that is there, and then again after a
    # whole second. Here it looks more often, for the same 10 s.
    "RAY_raylet_client_connect_timeout_milliseconds": "50",
    "RAY_raylet_client_num_connect_attempts": "200",
}


@hydra_main
def main(config: DictConfig) -> None:
    """Hydra hands over the composed config; everything after this line works on the typed one."""
    run_ppo(config)


def run_ppo(config: DictConfig) -> dict[str, float]:
    """Validate ``config``, start Ray and train; returns the last validation's metrics (empty without one).

    Raises:
        ConfigError: a value that cannot work, before anything is started.
        ValueError: the checkpoint to go on from is none, also before that.
    """
    typed = prepare_config(config)
    if end := nothing_left(typed, known_total_steps(typed)):
        logger.info(end)
        return {}
    startup = StartupLedger(typed.trainer.progress_bar)
    startup.mark("configuration")
    keep_bytecode(typed.trainer.compile_cache_dir)
    with StopSignals() as signals:
        with startup.part("ray", "starting Ray"):
            start_ray(typed)
        signals.listen()
        import ray

        try:
            return TaskRunner().run(typed, startup)
        finally:
            ray.shutdown()


def start_ray(config: PPOTrainerConfig) -> None:
    """Start a local Ray, or join the one that ``RAY_ADDRESS`` names.

    A signal to the group of this process does not reach the processes of a local Ray, so that this one can answer it.

    Raises:
        ConfigError: a Ray of our own cannot start in the folder it would take, such as on a full disk.
    """
    # Ray takes lines that differ in digits alone for copies, leaves them out or holds them back; not those of ours. It
    # reads this when it is imported.
    os.environ.setdefault("RAY_DEDUP_LOGS_ALLOW_REGEX", OWN_LINE)
    import ray

    from verl.utils.lost_actors import unusable_ray_folder
    from verl.utils.process_sessions import children_in_own_sessions

    if ray.is_initialized():
        return
    resources: dict[str, Any] = {}
    if not os.environ.get("RAY_ADDRESS"):  # a cluster that runs already has what it has
        if unusable := unusable_ray_folder():
            raise ConfigError(unusable)
        resources = {"address": "local", "num_cpus": config.ray_init.num_cpus or max(os.cpu_count() or 1, 4)}
        if config.trainer.device == "cuda":
            resources["num_gpus"] = visible_gpus()
        for name, value in RAY_SETTINGS.items():
            os.environ.setdefault(name, value)
    with children_in_own_sessions():
        ray.init(
            **resources,
            include_dashboard=False,
            log_to_driver=True,
            logging_level=logging.WARNING,
            runtime_env={"env_vars": {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN"}},
        )


class TaskRunner:
    """Builds what a run consists of and hands it to ``RayPPOTrainer``."""

    def run(self, config: PPOTrainerConfig, startup: StartupLedger | None = None) -> dict[str, float]:
        """Start the ranks, build the trainer meanwhile, and train; returns the last validation's metrics.

        However it ends, no rank is left.
        """
        from verl.trainer.ppo.resources import ResourcePoolManager, Role, start_ranks

        limit = config.trainer.start_timeout
        startup = startup or StartupLedger(config.trainer.progress_bar)
        roles = {
            Role.ActorRollout: "verl.workers.fsdp_workers.ActorRolloutRefWorker",
            Role.Critic: "verl.workers.fsdp_workers.CriticWorker",
            Role.RewardModel: "verl.workers.fsdp_workers.RewardModelWorker",
        }
        pools = ResourcePoolManager(
            resource_pool_spec={"global_pool": [config.trainer.n_gpus_per_node] * config.trainer.nnodes},
            mapping={role: "global_pool" for role in roles},
            use_gpu=config.trainer.device == "cuda",
        )
        ranks = start_ranks(config, roles, pools, config.uses_critic)
        startup.mark("ranks_asked")
        loading = reported("start: loading libraries, tokenizer and data", config.trainer.progress_bar)
        with loading, _ended_on_failure(ranks), interrupted_by_failure(ranks.warming_up, lambda: ranks.wait(limit)):
            trainer = self._build_trainer(
                config, role_worker_mapping=roles, resource_pool_manager=pools, ranks=ranks, startup=startup
            )
        try:
            if end := nothing_left(config, trainer.total_training_steps):  # now the number of steps is known for sure
                logger.info(end)
                return {}
            if changed := changed_values(config):
                logger.warning(changed)
            with _ended_on_failure(ranks):
                trainer.init_workers()
            return trainer.fit()
        finally:
            trainer.shutdown()

    def _build_trainer(self, config: PPOTrainerConfig, **resources: Any) -> RayPPOTrainer:
        """Import, look up and load what the driver needs; ``resources`` are arguments of the trainer as they are."""
        with undisturbed(), made_to_stay():
            from agent_system.environments.env_manager import make_envs
            from agent_system.environments.registry import registered_name
            from agent_system.multi_turn_rollout import TrajectoryCollector
            from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
            from verl.trainer.ppo.ray_trainer import RayPPOTrainer
            from verl.trainer.ppo.reward import load_reward_manager
            from verl.utils.dataset.rl_dataset import collate_fn
            from verl.utils.external_lib import import_external_lib
            from verl.utils.fs import copy_to_local
            from verl.utils.tokenizer import hf_tokenizer
            from verl.utils.tracking import import_packages

            import_packages(config.trainer.logger)

        def build_envs() -> tuple[Any, Any]:
            with noted(f"from env.env_name={config.env.env_name}"):
                return make_envs(config)

        model = config.actor_rollout_ref.model
        import_external_lib(model.external_lib)
        registered_name(config.env.env_name)  # names that nobody registered end the run here
        get_adv_estimator_fn(config.algorithm.adv_estimator)
        get_policy_loss_fn(config.actor_rollout_ref.actor.policy_loss.loss_mode)
        local_path = copy_to_local(model.path, use_shm=model.use_shm, key="actor_rollout_ref.model.path")
        tokenizer = hf_tokenizer(local_path, trust_remote_code=model.trust_remote_code)
        if not (tokenizer.chat_template or config.data.apply_chat_template_kwargs.get("chat_template")):
            raise ValueError(
                f"actor_rollout_ref.model.path={model.path}: its tokenizer has no chat template. Take a folder with "
                "the tokenizer's files and a template, or set data.apply_chat_template_kwargs.chat_template"
            )
        train_dataset = create_rl_dataset(config.data.train_files, config.data, tokenizer, None)
        val_dataset = create_rl_dataset(config.data.val_files, config.data, tokenizer, None)
        return RayPPOTrainer(
            config=config,
            tokenizer=tokenizer,
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            collate_fn=collate_fn,
            train_sampler=create_rl_sampler(config.data, train_dataset),
            reward_fn=load_reward_manager(config, tokenizer, num_examine=0),
            val_reward_fn=load_reward_manager(config, tokenizer, num_examine=1),
            traj_collector=TrajectoryCollector(config=config, tokenizer=tokenizer, processor=None),
            make_envs=build_envs,
            **resources,
        )


@contextmanager
def _ended_on_failure(ranks: StartingRanks) -> Iterator[None]:
    """Around what happens while ranks start or load: if it fails they end at once, as they have nothing to finish."""
    try:
        yield
    except BaseException:
        ranks.root.shutdown(grace_seconds=0)
        raise


def create_rl_dataset(data_paths: str | Sequence[str], data_config: Any, tokenizer: Any, processor: Any) -> Any:
    """The dataset of ``data_paths``: ``RLHFDataset``, or the class of ``data.custom_cls``.

    Raises:
        ValueError: a custom class that is no torch ``Dataset``. What its file or constructor raises has a note with
            the key.
    """
    from torch.utils.data import Dataset

    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl.utils.import_utils import load_extern_type

    custom = data_config.custom_cls
    if not custom.path:
        return RLHFDataset(data_files=data_paths, tokenizer=tokenizer, processor=processor, config=data_config)
    with noted(f"from data.custom_cls.path={custom.path}, data.custom_cls.name={custom.name}"):
        dataset_class = load_extern_type(custom.path, custom.name)
        if not (isinstance(dataset_class, type) and issubclass(dataset_class, Dataset)):
            raise ValueError(f"data.custom_cls.name={custom.name} must be a subclass of torch.utils.data.Dataset")
        return dataset_class(data_files=data_paths, tokenizer=tokenizer, processor=processor, config=data_config)


def create_rl_sampler(data_config: Any, dataset: Any) -> Any:
    """Random order seeded by ``data.seed`` when ``data.shuffle``, else the order of the file.

    The random sampler is torchdata's, whose generator is part of the data loader's state: with torch's own, a run
    resumed after the first epoch would see that epoch's order again.
    """
    import torch
    from torch.utils.data import SequentialSampler
    from torchdata.stateful_dataloader.sampler import RandomSampler

    if not data_config.shuffle:
        return SequentialSampler(dataset)
    generator = torch.Generator()
    generator.manual_seed(data_config.seed if data_config.seed is not None else 1)
    return RandomSampler(dataset, generator=generator)


if __name__ == "__main__":
    main()
