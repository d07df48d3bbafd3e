"""Numbers that follow from a configuration: sizes of a step and of a run; those of memory come from ``memory``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from verl.trainer.config.group_size import group_size, train_group_size, val_group_size
from verl.trainer.config.memory import memory_phases, model_shapes
from verl.trainer.config.schema import ActorConfig, CriticConfig, PPOTrainerConfig
from verl.trainer.config.validate_files import parquet_rows

_UNKNOWN = "the config.json of {} is not on this machine, or not of a dense model like Llama and Qwen"


def derived_lines(config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
    """``(what, figure)`` pairs, in reading order; a configuration with a size below 1 has none."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    sizes = (config.world_size, config.data.train_batch_size, actor.ppo_mini_batch_size, rollout.ranks_per_engine)
    if min(*sizes, config.env.rollout.n, rollout.val_kwargs.n) < 1:
        return
    yield from _step_lines(config)
    yield from _run_lines(config)
    yield from _memory_lines(config)


def _memory_lines(config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
    shapes = model_shapes(config)
    for model, (key, shape) in shapes.items():
        if shape is not None:
            yield f"{model} parameters", f"{shape.parameters / 1e6:,.1f} M"
        elif model != "model":
            yield f"{model} parameters", f"unknown and not counted: {_UNKNOWN.format(key)}"
    if shapes["model"][1] is None:
        yield "memory per rank", f"unknown: {_UNKNOWN.format(shapes['model'][0])}"
        return
    known = {model: shape for model, (_, shape) in shapes.items() if shape is not None}
    for phase, gib, parts in memory_phases(config, known):
        yield f"memory per rank, {phase}", f"{gib:.2f} GiB ({parts})"


def _step_lines(config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
    tasks, group, ranks = config.data.train_batch_size, group_size(config), config.world_size
    trajectories, steps = tasks * group, config.env.max_steps
    actor = config.actor_rollout_ref.actor
    fewest, most = trajectories, trajectories * steps
    updates = [math.ceil(rows / actor.ppo_mini_batch_size) * actor.ppo_epochs for rows in (fewest, most)]
    yield "ranks", f"{ranks} ({config.trainer.nnodes} x {config.trainer.n_gpus_per_node}, {config.trainer.device})"
    yield "rollout engines", _engines(config)
    yield "trajectories per training step", f"{trajectories} = {tasks} tasks x {group} episodes"
    yield "rows (LLM calls) per training step", f"{fewest} to {most} = trajectories x 1 to {steps} agent steps"
    yield "rows per rank", f"{fewest // ranks} to {math.ceil(most / ranks)}"
    yield "tokens per row, at most", str(config.data.max_prompt_length + config.data.max_response_length)
    span = str(updates[0]) if updates[0] == updates[1] else f"{updates[0]} to {updates[1]}"
    yield "optimiser steps per training step", f"{span} of {actor.ppo_mini_batch_size} rows at most"
    yield "micro-batches of the update", _micro_batches(actor)
    if config.uses_critic:
        yield "micro-batches of the critic", _micro_batches(config.critic)
    if config.algorithm.filter_groups.enable:
        started = config.data.gen_batch_size or tasks
        most_tried = config.algorithm.filter_groups.max_num_gen_batches * started
        yield "tasks tried per training step", f"{started} to {most_tried} (algorithm.filter_groups)"


def _micro_batches(update: ActorConfig | CriticConfig) -> str:
    if update.use_dynamic_bsz:
        return f"filled with rows up to {update.ppo_max_token_len_per_gpu} tokens"
    if update.ppo_micro_batch_size_per_gpu is not None:
        return f"{update.ppo_micro_batch_size_per_gpu} rows"
    rows = update.ppo_micro_batch_size
    return "not set" if rows is None else f"{rows} rows over all ranks"


def _engines(config: PPOTrainerConfig) -> str:
    rollout = config.actor_rollout_ref.rollout
    size = rollout.ranks_per_engine
    return f"{config.world_size // max(size, 1)} x {rollout.name} with tensor parallel {size}"


def _run_lines(config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
    data, trainer = config.data, config.trainer
    val_rows = _rows(data.val_files)
    total = known_total_steps(config)
    unknown = "known to data.custom_cls alone" if data.custom_cls.path else "unknown until data.train_files is written"
    yield "training steps", unknown if total is None else str(total)
    validations = _validations(config, total)
    per = val_group_size(config)
    if val_rows is None:
        yield "validation tasks", "unknown until data.val_files is written"
    else:
        episodes = val_rows * per
        yield "validation tasks", f"{val_rows}, {data.val_batch_size} at a time, {per} episode(s) each"
        yield "LLM calls per validation", f"{episodes} to {episodes * config.env.max_steps}"
    yield "validations", "unknown" if validations is None else str(validations)
    yield "checkpoints", "none (trainer.save_freq)" if trainer.save_freq <= 0 else f"every {trainer.save_freq} steps"
    environments = (data.gen_batch_size or data.train_batch_size) * train_group_size(config)
    cpus = environments * config.env.resources_per_worker.num_cpus
    yield "training environments", f"{environments} ({cpus:g} CPUs counted)"
    yield "run folder", trainer.run_dir


def known_total_steps(config: PPOTrainerConfig) -> int | None:
    """Training steps of the whole run, from the number of rows in ``data.train_files``; None where they do not say it.

    ``data.filter_overlong_prompts`` may leave fewer rows.
    """
    data, trainer = config.data, config.trainer
    if trainer.total_training_steps or data.custom_cls.path:  # a dataset of the user's own has as many rows as it likes
        return trainer.total_training_steps or None
    rows = _rows(data.train_files)
    return None if rows is None else rows // (data.gen_batch_size or data.train_batch_size) * trainer.total_epochs


def _validations(config: PPOTrainerConfig, total: int | None) -> int | None:
    trainer = config.trainer
    first = int(trainer.val_before_train)
    if trainer.val_only or trainer.test_freq <= 0:
        return first
    return None if total is None else first + math.ceil(total / trainer.test_freq)


def _rows(files: str | list[str]) -> int | None:
    """Rows of parquet files; None where one cannot be read."""
    try:
        return sum(parquet_rows(Path(name).expanduser()) for name in ([files] if isinstance(files, str) else files))
    except (OSError, ValueError):
        return None
