"""Numbers that follow from a configuration: sizes of a step, of a run, and memory by phase.

Memory is an estimate from the model's own ``config.json``: weights, gradients and optimiser state are exact up to
alignment; activations are those of one micro-batch with the attention kept out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl.trainer.config.schema import PPOTrainerConfig
from verl.trainer.config.validate_files import local_folder

_BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
_GIB = 2**30
_LOGITS_CHUNK_TOKENS = 2048
_ADAM_MOMENTS_BYTES = 8  # two fp32 moments a parameter


@dataclass(frozen=True)
class ModelShape:
    """What the estimate needs of a decoder model."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    kv_width: int  # key (or value) features a token and layer


def derived_lines(config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
    """``(what, figure)`` pairs, in reading order."""
    yield from _step_lines(config)
    yield from _run_lines(config)
    shape = model_shape(config)
    if shape is None:
        yield "memory per rank", "unknown: the model's config.json is not on this machine"
    else:
        yield "model parameters", f"{shape.parameters / 1e6:,.1f} M"
        yield from (
            (f"memory per rank, {phase}", f"{gib:.2f} GiB ({parts})")
            for phase, gib, parts in memory_phases(config, shape)
        )


def _step_lines(config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
    tasks, group, ranks = config.data.train_batch_size, config.env.rollout.n, config.world_size
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
    if config.algorithm.filter_groups.enable:
        started = config.data.gen_batch_size or tasks
        most_tried = config.algorithm.filter_groups.max_num_gen_batches * started
        yield "tasks tried per training step", f"{started} to {most_tried} (algorithm.filter_groups)"


def _engines(config: PPOTrainerConfig) -> str:
    rollout = config.actor_rollout_ref.rollout
    size = rollout.ranks_per_engine
    return f"{config.world_size // max(size, 1)} x {rollout.name} with tensor parallel {size}"


def _run_lines(config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
    data, trainer = config.data, config.trainer
    train_rows, val_rows = _rows(data.train_files), _rows(data.val_files)
    total = trainer.total_training_steps
    if total is None and train_rows is not None:
        total = train_rows // (data.gen_batch_size or data.train_batch_size) * trainer.total_epochs
    yield "training steps", "unknown until data.train_files is written" if total is None else str(total)
    validations = _validations(config, total)
    per = config.actor_rollout_ref.rollout.val_kwargs.n
    if val_rows is None:
        yield "validation tasks", "unknown until data.val_files is written"
    else:
        episodes = val_rows * per
        yield "validation tasks", f"{val_rows}, {data.val_batch_size} at a time, {per} episode(s) each"
        yield "LLM calls per validation", f"{episodes} to {episodes * config.env.max_steps}"
    yield "validations", "unknown" if validations is None else str(validations)
    yield "checkpoints", "none (trainer.save_freq)" if trainer.save_freq <= 0 else f"every {trainer.save_freq} steps"
    baselines = int(config.algorithm.adv_estimator == "remax")
    environments = (data.gen_batch_size or data.train_batch_size) * (config.env.rollout.n + baselines)
    cpus = environments * config.env.resources_per_worker.num_cpus
    yield "training environments", f"{environments} ({cpus:g} CPUs counted)"
    yield "run folder", trainer.run_dir


def _validations(config: PPOTrainerConfig, total: int | None) -> int | None:
    trainer = config.trainer
    first = int(trainer.val_before_train)
    if trainer.val_only or trainer.test_freq <= 0:
        return first
    return None if total is None else first + math.ceil(total / trainer.test_freq)


def _rows(files: str | list[str]) -> int | None:
    """Rows of parquet files; None where one cannot be read."""
    from pathlib import Path

    import pyarrow.parquet as pq

    try:
        names = [files] if isinstance(files, str) else files
        return sum(int(pq.read_metadata(Path(name).expanduser()).num_rows) for name in names)
    except (OSError, ValueError):
        return None


def model_shape(config: PPOTrainerConfig) -> ModelShape | None:
    """Shape of the policy from its ``config.json``; None where that is not on this machine or not understood."""
    path = config.actor_rollout_ref.model.path
    folder = local_folder(path) if path else None
    if folder is None or not (folder / "config.json").is_file():
        return None
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    raw = raw.get("text_config", raw) | dict(config.actor_rollout_ref.model.override_config)
    try:
        return shape_from_json(raw)
    except (KeyError, TypeError):
        return None


def shape_from_json(raw: Mapping[str, Any]) -> ModelShape:
    """The shape of a decoder of the Llama and Qwen families.

    Raises:
        KeyError, TypeError: the configuration is of another family.
    """
    hidden, layers, vocabulary = int(raw["hidden_size"]), int(raw["num_hidden_layers"]), int(raw["vocab_size"])
    heads, intermediate = int(raw["num_attention_heads"]), int(raw["intermediate_size"])
    head_dim = int(raw.get("head_dim") or hidden // heads)
    kv_width = int(raw.get("num_key_value_heads") or heads) * head_dim
    biases = heads * head_dim + 2 * kv_width if raw.get("model_type") == "qwen2" else 0
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_width + biases
    block = attention + 3 * hidden * intermediate + 2 * hidden
    embeddings = vocabulary * hidden * (1 if raw.get("tie_word_embeddings", False) else 2)
    return ModelShape(
        parameters=embeddings + layers * block + hidden,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        vocabulary=vocabulary,
        kv_width=kv_width,
    )


def memory_phases(config: PPOTrainerConfig, shape: ModelShape) -> Iterator[tuple[str, float, str]]:
    """``(phase, GiB, parts)`` per rank for the phases of a training step."""
    main, ranks = config.actor_rollout_ref, config.world_size
    rollout, fsdp = main.rollout, main.actor.fsdp_config
    weights = shape.parameters * _BYTES[fsdp.model_dtype] / ranks / _GIB
    optimiser = shape.parameters * _ADAM_MOMENTS_BYTES / ranks / _GIB
    reference = 0.0
    if config.uses_reference and not main.ref.fsdp_config.param_offload and main.model.lora_rank == 0:
        reference = shape.parameters * _BYTES[main.ref.fsdp_config.model_dtype] / ranks / _GIB
    tensor_parallel = rollout.ranks_per_engine
    engine_dtype = (
        rollout.dtype if rollout.dtype != "auto" else ("float32" if config.trainer.device == "cpu" else "bf16")
    )
    engine = shape.parameters * _BYTES[engine_dtype] / tensor_parallel / _GIB
    kv_token = 2 * shape.layers * shape.kv_width * _BYTES[engine_dtype] / tensor_parallel
    trained = main.model.lora_rank == 0
    kept = (0.0 if fsdp.param_offload else weights) + (0.0 if fsdp.optimizer_offload or not trained else optimiser)
    yield (
        "roll out",
        kept + reference + engine,
        f"trainer {kept:.2f}, reference {reference:.2f}, engine weights {engine:.2f}, and a KV cache of "
        f"{kv_token / 1024:.1f} KiB a token",
    )
    activations = _activations_gib(config, shape)
    gradients = weights if trained else 0.0
    total = weights + gradients + (optimiser if trained else 0.0) + reference + activations
    left = "" if rollout.free_cache_engine and config.trainer.device != "cpu" else ", and the engine stays"
    yield (
        "update",
        total,
        f"weights {weights:.2f}, gradients {gradients:.2f}, Adam {optimiser if trained else 0.0:.2f}, reference "
        f"{reference:.2f}, activations {activations:.2f} for {micro_batch_tokens(config)} tokens{left}",
    )


def micro_batch_tokens(config: PPOTrainerConfig) -> int:
    """Tokens of one micro-batch of the actor's update on a rank, at most."""
    actor = config.actor_rollout_ref.actor
    row = config.data.max_prompt_length + config.data.max_response_length
    if actor.use_dynamic_bsz:
        return actor.ppo_max_token_len_per_gpu
    per_rank = actor.ppo_micro_batch_size_per_gpu
    if per_rank is None:
        per_rank = max(1, (actor.ppo_micro_batch_size or config.world_size) // config.world_size)
    return row * per_rank


def _activations_gib(config: PPOTrainerConfig, shape: ModelShape) -> float:
    tokens = micro_batch_tokens(config)
    width = _BYTES[config.actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype]
    one_block = tokens * (8 * shape.hidden + 2 * shape.kv_width + 3 * shape.intermediate) * width
    blocks = one_block * shape.layers
    if config.actor_rollout_ref.model.enable_gradient_checkpointing:
        blocks = one_block + tokens * shape.hidden * shape.layers * width
    logits = min(tokens, _LOGITS_CHUNK_TOKENS) * shape.vocabulary * 4 * 2
    return (blocks + logits) / _GIB
