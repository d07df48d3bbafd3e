"""``trainer`` and ``ray_init``: the run, its machine, its trackers and its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl.trainer.config.schema.node import ConfigNode


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(ConfigNode):
    """The run. Frequencies count training steps, time limits are seconds."""

    balance_batch: bool
    total_epochs: int
    total_training_steps: int | None
    project_name: str
    experiment_name: str
    logger: list[str] | str
    log_val_generations: int
    profile_steps: list[int] | None
    rollout_data_dir: str | None
    validation_data_dir: str | None
    nnodes: int
    n_gpus_per_node: int
    device: Literal["auto", "cuda", "cpu"]
    save_freq: int
    resume_mode: Literal["auto", "disable", "resume_path"]
    resume_from_path: str | None
    val_before_train: bool
    val_only: bool
    test_freq: int
    critic_warmup: int
    default_hdfs_dir: str | None
    del_local_ckpt_after_load: bool
    default_local_dir: str
    run_dir: str
    max_actor_ckpt_to_keep: int | None
    max_critic_ckpt_to_keep: int | None
    ray_wait_register_center_timeout: int
    start_timeout: float
    step_timeout: float
    compile_cache_dir: str | None
    progress_bar: bool


@dataclass(frozen=True, kw_only=True)
class RayInitConfig(ConfigNode):
    """How Ray is started; ``RAY_ADDRESS`` in the environment joins one that runs."""

    num_cpus: int | None
