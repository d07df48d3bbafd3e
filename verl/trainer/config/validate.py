"""Rules that a configuration has to meet before anything starts.

Each rule yields messages that name the keys to change and values that would fit; all of them are reported together.
Single numbers are in ``validate_numbers``, what needs the disk in ``validate_files``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator

from verl.trainer.config import machine
from verl.trainer.config.errors import ConfigError, nearest
from verl.trainer.config.names import (
    ADV_ESTIMATORS,
    ENVIRONMENTS,
    POLICY_LOSSES,
    TRACKERS,
    environment_meant,
    unknown_environment,
)
from verl.trainer.config.schema import PPOTrainerConfig
from verl.trainer.config.validate_files import (
    check_code,
    check_model,
    check_parquet,
    check_paths,
    check_tokenizers,
)
from verl.trainer.config.validate_numbers import (
    at_least,
    check_covariance_losses,
    check_finite,
    check_lora,
    check_numbers,
    check_optim,
    check_sampling,
    check_schedule,
)
from verl.trainer.config.validate_rewards import check_groups, check_overlong, check_reward_model

Rule = Callable[[PPOTrainerConfig], Iterator[str]]

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"


def validate(config: PPOTrainerConfig) -> None:
    """Check a configuration.

    Raises:
        ConfigError: one line for each rule that is not met.
    """
    problems = [message for rule in RULES for message in rule(config)]
    if problems:
        raise ConfigError(*problems)


# ---------------------------------------------------------------------------------------------------------------------
# what there is to choose from


def check_support(config: PPOTrainerConfig) -> Iterator[str]:
    """Values that exist elsewhere and not here."""
    main = config.actor_rollout_ref
    for key, strategy in (
        (f"{_ACTOR}.strategy", main.actor.strategy),
        (f"{_REF}.strategy", main.ref.strategy),
        ("critic.strategy", config.critic.strategy),
        ("reward_model.strategy", config.reward_model.strategy),
    ):
        if strategy == "megatron":
            yield f"{key}=megatron is not possible here; use {key}=fsdp"
    if not main.hybrid_engine:
        yield "actor_rollout_ref.hybrid_engine=false is not possible: trainer and engine share their ranks; use true"
    if main.rollout.n != 1:
        yield (
            f"{_ROLLOUT}.n={main.rollout.n} has to be 1: the group size is env.rollout.n; use {_ROLLOUT}.n=1 "
            f"env.rollout.n={main.rollout.n}"
        )
    for key, size in (
        (f"{_ACTOR}.ulysses_sequence_parallel_size", main.actor.ulysses_sequence_parallel_size),
        (f"{_REF}.ulysses_sequence_parallel_size", main.ref.ulysses_sequence_parallel_size),
        ("critic.ulysses_sequence_parallel_size", config.critic.ulysses_sequence_parallel_size),
        ("reward_model.ulysses_sequence_parallel_size", config.reward_model.ulysses_sequence_parallel_size),
    ):
        follows = key.startswith(_REF) and size == main.actor.ulysses_sequence_parallel_size
        if size != 1 and not follows:
            yield (
                f"{key}={size} is not possible here: every sequence stays on one rank; use 1, and use_dynamic_bsz=true "
                "or enable_gradient_checkpointing=true where long sequences need the memory"
            )
    if config.reward_model.reward_manager != "episode":
        yield (
            f"reward_model.reward_manager={config.reward_model.reward_manager} is not possible here; use episode, or "
            "custom_reward_function.path for a reward of your own"
        )
    if config.trainer.default_hdfs_dir is not None:
        yield "trainer.default_hdfs_dir is not possible here; use null, and trainer.default_local_dir for the folder"
    contents = main.actor.checkpoint.contents
    for key, given in (
        (f"{_ACTOR}.checkpoint.contents", contents),
        ("critic.checkpoint.contents", config.critic.checkpoint.contents),
    ):
        missing = [one for one in ("model", "optimizer", "extra") if one not in given]
        if missing:
            yield f"{key} lacks {', '.join(missing)}, without which a run cannot be resumed; add it"


def check_names(config: PPOTrainerConfig) -> Iterator[str]:
    """Names of estimators, losses, environments and trackers; with ``external_lib`` they may be the user's own."""
    own = config.actor_rollout_ref.model.external_lib is not None
    chosen = [
        ("algorithm.adv_estimator", config.algorithm.adv_estimator, ADV_ESTIMATORS),
        (f"{_ACTOR}.policy_loss.loss_mode", config.actor_rollout_ref.actor.policy_loss.loss_mode, POLICY_LOSSES),
    ]
    for key, name, known in chosen:
        if name not in known and not own:
            meant = nearest(name, known)
            yield (
                f"{key}={name} is not known; "
                + (f"did you mean {meant}? There are " if meant else "there are ")
                + f"{', '.join(known)}; a module that registers one of your own goes into "
                "actor_rollout_ref.model.external_lib"
            )
    if not own and environment_meant(config.env.env_name, ENVIRONMENTS) is None:
        yield (
            f"{unknown_environment(config.env.env_name, ENVIRONMENTS)}, such as env.env_name=Webshop; a module that "
            "registers one of your own goes into actor_rollout_ref.model.external_lib"
        )
    loggers = config.trainer.logger
    for name in [loggers] if isinstance(loggers, str) else loggers:
        if name not in TRACKERS:
            yield f"trainer.logger has {name!r}; there are {', '.join(TRACKERS)}"


# ---------------------------------------------------------------------------------------------------------------------
# sizes that have to fit together


def check_batch(config: PPOTrainerConfig) -> Iterator[str]:
    """Tasks, groups and ranks."""
    data, group, ranks = config.data, config.env.rollout.n, config.world_size
    yield from at_least(
        [
            ("data.train_batch_size", data.train_batch_size),
            ("data.val_batch_size", data.val_batch_size),
            ("data.gen_batch_size", data.gen_batch_size),
            ("env.rollout.n", group),
            ("env.max_steps", config.env.max_steps),
            ("trainer.nnodes", config.trainer.nnodes),
            ("trainer.n_gpus_per_node", config.trainer.n_gpus_per_node),
            (f"{_ROLLOUT}.val_kwargs.n", config.actor_rollout_ref.rollout.val_kwargs.n),
        ]
    )
    if data.val_batch_size is None:
        yield (
            "data.val_batch_size=null: set it to the number of validation environments that run at a time, such as "
            "data.val_batch_size=128"
        )
    if data.train_batch_size < 1 or group < 1 or ranks < 1:
        return
    episodes = data.train_batch_size * group
    if episodes % ranks:
        step = ranks // math.gcd(ranks, group)
        fits = [
            size for size in (data.train_batch_size // step * step, -(-data.train_batch_size // step) * step) if size
        ]
        yield (
            f"data.train_batch_size*env.rollout.n = {data.train_batch_size}*{group} = {episodes} does not divide over "
            f"{ranks} ranks (trainer.nnodes*trainer.n_gpus_per_node); use data.train_batch_size="
            + " or ".join(str(size) for size in fits)
        )
    if config.algorithm.adv_estimator == "grpo_passk" and group < 2:
        yield "algorithm.adv_estimator=grpo_passk compares episodes of a task; use env.rollout.n=2 or more"


def check_parallel(config: PPOTrainerConfig) -> Iterator[str]:
    """Tensor parallelism of the engine and the GPUs of this machine."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    size, ranks = rollout.tensor_model_parallel_size, config.world_size
    key = f"{_ROLLOUT}.tensor_model_parallel_size"
    if ranks < 1:
        return  # said by check_batch
    if size < 1:
        yield f"{key}={size} has to be at least 1"
    elif rollout.ranks_per_engine > ranks:
        yield (
            f"{key}={size} needs {size} ranks, but there are {ranks} "
            f"(trainer.nnodes*trainer.n_gpus_per_node); use {key}={ranks}"
        )
    elif trainer.n_gpus_per_node >= 1 and trainer.n_gpus_per_node % rollout.ranks_per_engine:
        fits = [one for one in range(1, trainer.n_gpus_per_node + 1) if trainer.n_gpus_per_node % one == 0]
        yield (
            f"{key}={size} does not divide trainer.n_gpus_per_node={trainer.n_gpus_per_node}; use one of "
            f"{', '.join(map(str, fits))}"
        )
    joins_a_cluster = bool(os.environ.get("RAY_ADDRESS"))
    if trainer.device == "cuda" and not joins_a_cluster:
        gpus = machine.visible_gpus()
        if gpus == 0:
            yield (
                "trainer.device=cuda, but no NVIDIA GPU is visible on this machine; use trainer.device=cpu, or "
                "preset=embedded for a run that fits a machine without one"
            )
        elif trainer.n_gpus_per_node > gpus:
            fitting = math.gcd(gpus, max(rollout.ranks_per_engine, 1))
            yield (
                f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}, but this machine shows {gpus} GPU(s); use "
                f"trainer.n_gpus_per_node={gpus}" + (f" and {key}={fitting}" if rollout.name == "vllm" else "")
            )


def check_shards(config: PPOTrainerConfig) -> Iterator[str]:
    """Ranks that share a model: as many in each group."""
    main, ranks = config.actor_rollout_ref, config.world_size
    nodes = [(_ACTOR, main.actor.fsdp_config)]
    nodes += [(_REF, main.ref.fsdp_config)] if config.uses_reference else []
    nodes += [("critic.model", config.critic.model.fsdp_config)] if config.uses_critic else []
    nodes += [("reward_model.model", config.reward_model.model.fsdp_config)] if config.reward_model.enable else []
    for node, fsdp in nodes:
        if 0 < fsdp.fsdp_size < ranks and ranks % fsdp.fsdp_size:
            fits = [str(one) for one in range(1, ranks) if ranks % one == 0]
            yield (
                f"{node}.fsdp_config.fsdp_size={fsdp.fsdp_size} does not divide the {ranks} ranks "
                f"(trainer.nnodes*trainer.n_gpus_per_node); use -1 for all, or one of {', '.join(fits)}"
            )


def check_micro_batches(config: PPOTrainerConfig) -> Iterator[str]:
    """One way of sizing micro-batches for each forward pass there is."""
    main, critic = config.actor_rollout_ref, config.critic
    sizes = [
        (_ACTOR, "ppo_micro_batch_size", main.actor, main.actor.use_dynamic_bsz, "use_dynamic_bsz"),
        (
            _ROLLOUT,
            "log_prob_micro_batch_size",
            main.rollout,
            main.rollout.log_prob_use_dynamic_bsz,
            "log_prob_use_dynamic_bsz",
        ),
    ]
    if config.uses_reference:
        sizes.append(
            (_REF, "log_prob_micro_batch_size", main.ref, main.ref.log_prob_use_dynamic_bsz, "log_prob_use_dynamic_bsz")
        )
    if config.uses_critic:
        sizes.append(("critic", "ppo_micro_batch_size", critic, critic.use_dynamic_bsz, "use_dynamic_bsz"))
    judge = config.reward_model
    if judge.enable:
        sizes.append(("reward_model", "micro_batch_size", judge, judge.use_dynamic_bsz, "use_dynamic_bsz"))
    for node, key, values, dynamic, switch in sizes:
        total, per_rank = getattr(values, key), getattr(values, f"{key}_per_gpu")
        yield from at_least([(f"{node}.{key}", total), (f"{node}.{key}_per_gpu", per_rank)])
        if dynamic:
            continue
        if total is None and per_rank is None:
            yield (
                f"{node}.{key}_per_gpu is not set: use {node}.{key}_per_gpu=8 (rows per forward and rank) or "
                f"{node}.{switch}=true (a budget of tokens)"
            )
        elif total is not None and per_rank is not None:
            yield (
                f"{node}.{key}={total} and {node}.{key}_per_gpu={per_rank} exclude each other; leave out "
                f"{node}.{key}, which is deprecated"
            )
        elif total is not None and total % config.world_size:
            yield (
                f"{node}.{key}={total} does not divide over {config.world_size} ranks; use "
                f"{node}.{key}_per_gpu={max(1, total // config.world_size)} instead"
            )


def check_critic(config: PPOTrainerConfig) -> Iterator[str]:
    """An estimator that cannot do without a critic has one."""
    if config.algorithm.adv_estimator == "gae" and not config.uses_critic:
        yield (
            "critic.enable=false takes the values away from algorithm.adv_estimator=gae, which cannot do without; use "
            "critic.enable=null, or an estimator without a critic, such as algorithm.adv_estimator=grpo"
        )


def check_mini_batch(config: PPOTrainerConfig) -> Iterator[str]:
    """Mini-batches hold at least a row for each rank and whole micro-batches."""
    actor, critic = config.actor_rollout_ref.actor, config.critic
    nodes = [(_ACTOR, actor)] + ([("critic", critic)] if config.uses_critic else [])
    for node, values in nodes:
        mini, total = values.ppo_mini_batch_size, values.ppo_micro_batch_size
        if mini < config.world_size:
            yield (
                f"{node}.ppo_mini_batch_size={mini} is less than a row for each of the {config.world_size} ranks; "
                f"use {config.world_size} or more"
            )
        if total is not None and not values.use_dynamic_bsz and total > 0 and mini % total:
            yield (
                f"{node}.ppo_mini_batch_size={mini} is no multiple of {node}.ppo_micro_batch_size={total}; use "
                f"{node}.ppo_micro_batch_size_per_gpu instead"
            )
        yield from at_least([(f"{node}.ppo_epochs", values.ppo_epochs)])
    if config.uses_critic and critic.ppo_mini_batch_size != actor.ppo_mini_batch_size:
        yield (
            f"critic.ppo_mini_batch_size={critic.ppo_mini_batch_size} differs from {_ACTOR}.ppo_mini_batch_size="
            f"{actor.ppo_mini_batch_size}: actor and critic take their steps on the same mini-batches; leave "
            "critic.ppo_mini_batch_size out"
        )


def check_lengths(config: PPOTrainerConfig) -> Iterator[str]:
    """Prompts and responses against the engine's limits and the token budgets."""
    data, main = config.data, config.actor_rollout_ref
    rollout = main.rollout
    yield from at_least(
        [("data.max_prompt_length", data.max_prompt_length), ("data.max_response_length", data.max_response_length)]
    )
    row = rollout.prompt_length + rollout.response_length
    named = f"data.max_prompt_length+data.max_response_length = {row}"
    context = rollout.max_model_len or row
    if context < row:
        yield f"{_ROLLOUT}.max_model_len={context} is less than {named}; use null or {row}"
    if rollout.name == "vllm" and not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < context:
        yield (
            f"{_ROLLOUT}.max_num_batched_tokens={rollout.max_num_batched_tokens} is less than a context of {context} "
            f"tokens; use {context} or more, or {_ROLLOUT}.enable_chunked_prefill=true"
        )
    budgets = [
        (f"{_ACTOR}.ppo_max_token_len_per_gpu", main.actor.use_dynamic_bsz, main.actor.ppo_max_token_len_per_gpu),
        (
            f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",
            rollout.log_prob_use_dynamic_bsz,
            rollout.log_prob_max_token_len_per_gpu,
        ),
    ]
    if config.uses_reference:
        budgets.append(
            (
                f"{_REF}.log_prob_max_token_len_per_gpu",
                main.ref.log_prob_use_dynamic_bsz,
                main.ref.log_prob_max_token_len_per_gpu,
            )
        )
    if config.uses_critic:
        critic = config.critic
        budgets.append(("critic.ppo_max_token_len_per_gpu", critic.use_dynamic_bsz, critic.ppo_max_token_len_per_gpu))
    for key, dynamic, budget in budgets:
        if dynamic and budget < row:
            yield f"{key}={budget} is less than one row ({named}); use {row} or more"


RULES: tuple[Rule, ...] = (
    check_support,
    check_names,
    check_batch,
    check_parallel,
    check_shards,
    check_critic,
    check_micro_batches,
    check_mini_batch,
    check_lengths,
    check_groups,
    check_overlong,
    check_reward_model,
    check_numbers,
    check_finite,
    check_covariance_losses,
    check_lora,
    check_sampling,
    check_optim,
    check_schedule,
    check_model,
    check_tokenizers,
    check_code,
    check_parquet,
    check_paths,
)
