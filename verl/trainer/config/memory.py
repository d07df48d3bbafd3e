"""Memory of a rank by phase of a training step, estimated from the models' own ``config.json``.

Weights, gradients and optimiser state are exact up to alignment; activations are those of one micro-batch with the
attention kept out, and with gradient checkpointing those of an update that recomputes every layer: on a GPU it takes
what memory there is to recompute fewer. Weights that FSDP gathers on top of its shards are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from verl.trainer.config.schema import (
    ActorConfig,
    CriticConfig,
    CriticModelConfig,
    FSDPConfig,
    FSDPInferenceConfig,
    ModelConfig,
    PPOTrainerConfig,
)
from verl.trainer.config.validate_files import local_folder

_BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
_GIB = 2**30
_LOGITS_CHUNK_TOKENS = 2048
_ADAM_MOMENTS = 2  # of a parameter, in its dtype
_RECOMPUTED = " with all layers recomputed"


@dataclass(frozen=True)
class ModelShape:
    """What the estimate needs of a decoder model.

    Attributes:
        head: parameters of an output layer of its own; 0 where it is the embedding.
        kv_width: key (or value) features a token and layer.
        projections: ``(inputs, outputs)`` of the linear layers of a block, by their names in it.
    """

    parameters: int
    head: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    kv_width: int
    projections: Mapping[str, tuple[int, int]]

    def with_value_head(self) -> ModelShape:
        """The same decoder with a number per position instead of a word: one linear layer with a bias."""
        head = self.hidden + 1
        return replace(self, parameters=self.parameters - self.head + head, head=head)

    def adapter_parameters(self, rank: int, targets: str | list[str]) -> int:
        """Parameters of LoRA adapters: ``rank * (inputs + outputs)`` for each linear layer that gets one.

        Args:
            targets: ``all-linear``, a regular expression for whole names, or last parts of names, as peft takes them.
        """
        chosen = [size for name, size in self.projections.items() if _is_target(name, targets)]
        return self.layers * rank * sum(inputs + outputs for inputs, outputs in chosen)


def _is_target(name: str, targets: str | list[str]) -> bool:
    if targets == "all-linear":
        return True
    if isinstance(targets, str):
        try:
            return re.fullmatch(targets, f"model.layers.0.{name}") is not None
        except re.error:  # refused with its reason when the model is built
            return False
    return any(name == one or name.endswith(f".{one}") for one in targets)


def model_shapes(config: PPOTrainerConfig) -> dict[str, tuple[str, ModelShape | None]]:
    """``(key of the path, shape)`` of each model of a run: ``model`` (the policy), ``critic``, ``reward model``.

    A shape is None where the ``config.json`` is not on this machine or not understood.
    """
    policy, critic, judge = config.actor_rollout_ref.model, config.critic.model, config.reward_model.model
    found = {"model": ("actor_rollout_ref.model.path", _model_shape(policy.path, policy.override_config))}
    if config.uses_critic:
        found["critic"] = ("critic.model.path", _with_value_head(_model_shape(critic.path, critic.override_config)))
    if config.reward_model.enable:
        found["reward model"] = ("reward_model.model.path", _with_value_head(_model_shape(judge.path, {})))
    return found


def _with_value_head(shape: ModelShape | None) -> ModelShape | None:
    return shape.with_value_head() if shape is not None else None


def _model_shape(path: str | None, override: Mapping[str, Any]) -> ModelShape | None:
    folder = local_folder(path) if path else None
    if folder is None or not (folder / "config.json").is_file():
        return None
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    raw = raw.get("text_config", raw) | dict(override)
    try:
        return shape_from_json(raw)
    except (KeyError, TypeError):
        return None


def shape_from_json(raw: Mapping[str, Any]) -> ModelShape:
    """The shape of a decoder of the Llama and Qwen families.

    Raises:
        KeyError, TypeError: the configuration is of another family, or has experts.
    """
    if raw.get("num_experts_per_tok"):
        raise KeyError("num_experts_per_tok")
    hidden, layers, vocabulary = int(raw["hidden_size"]), int(raw["num_hidden_layers"]), int(raw["vocab_size"])
    heads, intermediate = int(raw["num_attention_heads"]), int(raw["intermediate_size"])
    head_dim = int(raw.get("head_dim") or hidden // heads)
    kv_width = int(raw.get("num_key_value_heads") or heads) * head_dim
    projections = {
        "self_attn.q_proj": (hidden, heads * head_dim),
        "self_attn.k_proj": (hidden, kv_width),
        "self_attn.v_proj": (hidden, kv_width),
        "self_attn.o_proj": (heads * head_dim, hidden),
        "mlp.gate_proj": (hidden, intermediate),
        "mlp.up_proj": (hidden, intermediate),
        "mlp.down_proj": (intermediate, hidden),
    }
    family = raw.get("model_type")
    biases = heads * head_dim + 2 * kv_width if family == "qwen2" else 0
    head_norms = 2 * head_dim if family == "qwen3" else 0
    block = sum(inputs * outputs for inputs, outputs in projections.values()) + biases + head_norms + 2 * hidden
    embedding = vocabulary * hidden
    head = 0 if raw.get("tie_word_embeddings", False) else embedding
    return ModelShape(
        parameters=embedding + head + layers * block + hidden,
        head=head,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        vocabulary=vocabulary,
        kv_width=kv_width,
        projections=projections,
    )


@dataclass(frozen=True)
class _Held:
    """GiB of one model on a rank: its parts while it is updated, and what stays there while others work."""

    weights: float = 0.0
    gradients: float = 0.0
    optimiser: float = 0.0
    at_rest: float = 0.0


def _held(config: PPOTrainerConfig, fsdp: FSDPConfig | FSDPInferenceConfig, frozen: int, trained: int = 0) -> _Held:
    """A model of ``frozen`` and ``trained`` parameters. On CPU there is nothing to offload to."""
    ranks, on_cuda = config.world_size, config.trainer.device != "cpu"
    if on_cuda and isinstance(fsdp, FSDPConfig) and fsdp.offload_policy:
        return _Held()
    sharers = fsdp.fsdp_size if 0 < fsdp.fsdp_size < ranks else ranks
    gib = _BYTES[fsdp.model_dtype] / sharers / _GIB
    weights, optimiser = (frozen + trained) * gib, _ADAM_MOMENTS * trained * gib
    stays = 0.0 if on_cuda and fsdp.param_offload else weights
    if not (on_cuda and isinstance(fsdp, FSDPConfig) and fsdp.optimizer_offload):
        stays += optimiser
    return _Held(weights=weights, gradients=trained * gib, optimiser=optimiser, at_rest=stays)


def _trained(
    config: PPOTrainerConfig, model: ModelConfig | CriticModelConfig, fsdp: FSDPConfig, shape: ModelShape, head: int
) -> _Held:
    """A model that learns: whole, or with LoRA its adapters and ``head`` further parameters."""
    if model.lora_rank <= 0:
        return _held(config, fsdp, 0, shape.parameters)
    adapters = shape.adapter_parameters(model.lora_rank, model.target_modules)
    return _held(config, fsdp, shape.parameters - head, adapters + head)


def memory_phases(config: PPOTrainerConfig, shapes: Mapping[str, ModelShape]) -> Iterator[tuple[str, float, str]]:
    """``(phase, GiB, parts)`` per rank for the phases of a training step.

    Args:
        shapes: of ``model``, and of ``critic`` and ``reward model`` where the run has them; see ``model_shapes``.
    """
    main, policy = config.actor_rollout_ref, shapes["model"]
    critic_model = config.critic.model
    held = {"trainer": _trained(config, main.model, main.actor.fsdp_config, policy, head=0)}
    if "critic" in shapes:
        value = shapes["critic"]
        held["critic"] = _trained(config, critic_model, critic_model.fsdp_config, value, head=value.head)
    has_reference = config.uses_reference and main.model.lora_rank == 0  # with LoRA it is the model without adapters
    held["reference"] = _held(config, main.ref.fsdp_config, policy.parameters) if has_reference else _Held()
    if "reward model" in shapes:
        held["reward model"] = _held(config, config.reward_model.model.fsdp_config, shapes["reward model"].parameters)

    engine, kv_token = _engine(config, policy)
    yield (
        "roll out",
        sum(one.at_rest for one in held.values()) + engine,
        ", ".join(f"{name} {one.at_rest:.2f}" for name, one in held.items())
        + f", engine weights {engine:.2f}, and a KV cache of {kv_token / 1024:.1f} KiB a token{_engine_room(config)}",
    )
    tokens = micro_batch_tokens(config, main.actor)
    dtype, saves = main.actor.fsdp_config.mixed_precision.param_dtype, main.model.enable_gradient_checkpointing
    logits = min(tokens, _LOGITS_CHUNK_TOKENS) * policy.vocabulary * 4 * 2 / _GIB
    activations = _activations_gib(policy, tokens, dtype, saves) + logits
    yield _update(config, "update", held, "trainer", activations, f"{tokens} tokens{_RECOMPUTED if saves else ''}")
    if "critic" in shapes:
        tokens = micro_batch_tokens(config, config.critic)
        dtype, saves = critic_model.fsdp_config.mixed_precision.param_dtype, critic_model.enable_gradient_checkpointing
        activations, said = _activations_gib(shapes["critic"], tokens, dtype, saves), _RECOMPUTED if saves else ""
        yield _update(config, "update of the critic", held, "critic", activations, f"{tokens} tokens{said}")


def _engine(config: PPOTrainerConfig, shape: ModelShape) -> tuple[float, float]:
    """GiB of the rollout engine's weights and bytes of its KV cache a token, both on a rank."""
    rollout = config.actor_rollout_ref.rollout
    automatic = "float32" if config.trainer.device == "cpu" else "bf16"
    width = _BYTES[automatic if rollout.dtype == "auto" else rollout.dtype]
    kv_token = 2 * shape.layers * shape.kv_width * width / rollout.ranks_per_engine
    return shape.parameters * width / rollout.ranks_per_engine / _GIB, kv_token


def _engine_room(config: PPOTrainerConfig) -> str:
    """What bounds the memory that a vLLM engine takes on a GPU, in words; empty for other engines."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "vllm" or config.trainer.device == "cpu":
        return ""
    if rollout.kv_cache_memory_mb is not None:
        return f", {rollout.kv_cache_memory_mb / 1024:.2f} GiB of it"
    return f"; the engine fills {rollout.gpu_memory_utilization:g} of the GPU with both"


def _update(
    config: PPOTrainerConfig, phase: str, held: Mapping[str, _Held], role: str, activations: float, micro_batch: str
) -> tuple[str, float, str]:
    """The phase in which the model ``role`` is updated and the others are at rest.

    Args:
        micro_batch: what the activations are those of, in words.
    """
    learner = held[role]
    others = {name: one.at_rest for name, one in held.items() if name != role}
    total = learner.weights + learner.gradients + learner.optimiser + sum(others.values()) + activations
    frees = config.actor_rollout_ref.rollout.free_cache_engine and config.trainer.device != "cpu"
    return (
        phase,
        total,
        f"weights {learner.weights:.2f}, gradients {learner.gradients:.2f}, Adam {learner.optimiser:.2f}, "
        + "".join(f"{name} {gib:.2f}, " for name, gib in others.items())
        + f"activations {activations:.2f} for {micro_batch}{'' if frees else ', and the engine stays'}",
    )


def micro_batch_tokens(config: PPOTrainerConfig, update: ActorConfig | CriticConfig) -> int:
    """Tokens of one micro-batch of an update on a rank, at most."""
    if update.use_dynamic_bsz:
        return update.ppo_max_token_len_per_gpu
    per_rank = update.ppo_micro_batch_size_per_gpu
    if per_rank is None:
        per_rank = max(1, (update.ppo_micro_batch_size or config.world_size) // config.world_size)
    return (config.data.max_prompt_length + config.data.max_response_length) * per_rank


def _activations_gib(shape: ModelShape, tokens: int, dtype: str, checkpointing: bool) -> float:
    """Activations of the decoder for ``tokens``, without attention; with ``checkpointing`` those of one block."""
    width = _BYTES[dtype]
    one_block = tokens * (8 * shape.hidden + 2 * shape.kv_width + 3 * shape.intermediate) * width
    if checkpointing:
        return (one_block + tokens * shape.hidden * shape.layers * width) / _GIB
    return one_block * shape.layers / _GIB
