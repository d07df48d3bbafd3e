"""Settings that have no effect here, said once in one line with what replaces them, and other things worth noting."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl.trainer.config import machine
from verl.trainer.config.names import ADV_ESTIMATORS, GROUP_ESTIMATORS
from verl.trainer.config.schema import PPOTrainerConfig, TrainerConfig

_PACKED = "rows are always packed"
_CHUNKED = "log-probabilities are computed in chunks"
_BLOCKS = "an FSDP unit is a transformer block"
_CHAT = "environments render the prompts"
_TEXT = "models read text only"
_BUFFERS = "buffers keep their dtype"
_REWARD = "rewards come from the environment, reward_model.enable is false"
_OWN_ENVIRONMENT = "no such environment ships; one of your own may read it"

NO_EFFECT: dict[str, str] = {
    "data.tokenizer": "the tokenizer is the model's",
    "data.return_raw_input_ids": "true token ids are always kept",
    "data.return_raw_chat": "the chat is always kept",
    "data.return_full_prompt": _CHAT,
    "data.need_tools_kwargs": "tools belong to the environment",
    "data.reward_fn_key": "the source of a row is its column data_source",
    "data.image_key": _TEXT,
    "data.video_key": _TEXT,
    "data.filter_overlong_prompts_workers": "prompts are measured in the driver",
    "data.trust_remote_code": "the tokenizer follows actor_rollout_ref.model.trust_remote_code",
    "data.filter_prompts": "use data.filter_overlong_prompts",
    "data.chat_template_func": "use data.apply_chat_template_kwargs",
    "actor_rollout_ref.model.enable_activation_offload": "use enable_gradient_checkpointing",
    "actor_rollout_ref.model.use_remove_padding": _PACKED,
    "actor_rollout_ref.model.use_liger": _CHUNKED,
    "actor_rollout_ref.model.use_fused_kernels": _CHUNKED,
    "actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params": _BLOCKS,
    "actor_rollout_ref.actor.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap": _BLOCKS,
    "actor_rollout_ref.ref.fsdp_config.wrap_policy.min_num_params": _BLOCKS,
    "actor_rollout_ref.ref.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap": _BLOCKS,
    "critic.model.fsdp_config.wrap_policy.min_num_params": _BLOCKS,
    "critic.model.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap": _BLOCKS,
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.buffer_dtype": _BUFFERS,
    "actor_rollout_ref.ref.fsdp_config.mixed_precision.buffer_dtype": _BUFFERS,
    "critic.model.fsdp_config.mixed_precision.buffer_dtype": _BUFFERS,
    "critic.rollout_n": "the group size is env.rollout.n",
    "trainer.max_critic_ckpt_to_keep": "checkpoints are kept whole; use trainer.max_actor_ckpt_to_keep",
    "actor_rollout_ref.rollout.mode": "episodes always run without a turn barrier",
    "actor_rollout_ref.rollout.chat_scheduler": "the loop is agent_system.multi_turn_rollout",
    "actor_rollout_ref.rollout.use_fire_sampling": "use temperature",
    "actor_rollout_ref.rollout.load_format": "weights come from the trainer",
    "actor_rollout_ref.rollout.layered_summon": "weights are streamed in buckets, never gathered whole",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space": "vLLM swaps nothing to host memory any more",
    "actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend": "engines are vllm and hf",
    "actor_rollout_ref.rollout.multi_turn.enable": "every rollout is multi-turn; use env.max_steps",
    "actor_rollout_ref.rollout.multi_turn.max_turns": "use env.max_steps",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": "tools belong to the environment",
    "actor_rollout_ref.rollout.multi_turn.format": "the tokenizer's chat template is used",
    "critic.model.enable_activation_offload": "use critic.model.enable_gradient_checkpointing",
    "critic.model.use_remove_padding": _PACKED,
    "reward_model.model.use_remove_padding": _PACKED,
    "reward_model.model.use_fused_kernels": "a reward model has no vocabulary to fuse",
    "reward_model.model.fsdp_config.wrap_policy.min_num_params": _BLOCKS,
    "reward_model.model.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap": _BLOCKS,
    "reward_model.model.fsdp_config.mixed_precision.buffer_dtype": _BUFFERS,
    "reward_model.strategy": _REWARD,
    "reward_model.model": _REWARD,
    "reward_model.micro_batch_size": _REWARD,
    "reward_model.micro_batch_size_per_gpu": _REWARD,
    "reward_model.max_length": _REWARD,
    "reward_model.ulysses_sequence_parallel_size": _REWARD,
    "reward_model.use_dynamic_bsz": _REWARD,
    "reward_model.forward_max_token_len_per_gpu": _REWARD,
    "reward_model.launch_reward_fn_async": "rewards take milliseconds beside the rest",
    "reward_model.sandbox_fusion": "use custom_reward_function",
    "env.alfworld": _OWN_ENVIRONMENT,
    "env.search": _OWN_ENVIRONMENT,
    "env.sokoban": _OWN_ENVIRONMENT,
}
"""Why a key, or every key of a node, has no effect."""

_ACTOR, _ROLLOUT, _REF = (f"actor_rollout_ref.{node}" for node in ("actor", "rollout", "ref"))
# Sections that cut micro-batches: their switch, and what their keys of numbers of rows and of tokens begin with.
_MICRO_BATCHES = (
    (_ACTOR, "use_dynamic_bsz", ("ppo_",)),
    (_ROLLOUT, "log_prob_use_dynamic_bsz", ("log_prob_",)),
    (_REF, "log_prob_use_dynamic_bsz", ("log_prob_",)),
    ("critic", "use_dynamic_bsz", ("ppo_", "forward_")),
)
# Keys, or the keys of a node, that count only where another key has a value.
_SWITCHED: dict[str, tuple[str, bool]] = {
    f"{_ACTOR}.kl_loss_coef": (f"{_ACTOR}.use_kl_loss", True),
    f"{_ACTOR}.kl_loss_type": (f"{_ACTOR}.use_kl_loss", True),
    "algorithm.kl_ctrl": ("algorithm.use_kl_in_reward", True),
    "algorithm.kl_penalty": ("algorithm.use_kl_in_reward", True),
    **{
        f"{node}.{prefix}{key}": (f"{node}.{switch}", dynamic)
        for node, switch, prefixes in _MICRO_BATCHES
        for prefix in prefixes
        for key, dynamic in (
            ("micro_batch_size", False),
            ("micro_batch_size_per_gpu", False),
            ("max_token_len_per_gpu", True),
        )
    },
}

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def notices(config: PPOTrainerConfig) -> list[str]:
    """What is worth saying about a configuration that can run, one line each."""
    lines = []
    own_environment = config.actor_rollout_ref.model.external_lib is not None
    ignored: dict[str, str] = {}
    for node, instead in NO_EFFECT.items():
        in_force = {_OWN_ENVIRONMENT: own_environment, _REWARD: config.reward_model.enable}.get(instead, False)
        if not in_force:
            for key in filter(lambda key: _changed(config, key), _leaves(node)):
                ignored.setdefault(key, instead)
    for node, (switch, needed) in _SWITCHED.items():
        if not _counts(config, node):
            for key in filter(lambda key: _changed(config, key), _leaves(node)):
                ignored.setdefault(key, f"{switch} is {str(not needed).lower()}{_instead_of_rows(key)}")
    if ignored:
        said = "; ".join(f"{key} ({instead})" for key, instead in ignored.items())
        lines.append("Settings without effect here: " + said)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if _changed(config, "actor_rollout_ref.actor.clip_ratio") and None not in (
        actor.clip_ratio_low,
        actor.clip_ratio_high,
    ):
        lines.append("actor_rollout_ref.actor.clip_ratio counts only where clip_ratio_low or clip_ratio_high is null")
    if rollout.name == "hf" and rollout.tensor_model_parallel_size > 1:
        lines.append(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size} has no effect "
            "with rollout.name=hf and counts as 1: each rank has an engine of its own"
        )
    estimator = config.algorithm.adv_estimator
    if config.env.rollout.n == 1 and estimator in GROUP_ESTIMATORS:
        lines.append(
            f"env.rollout.n=1 makes groups of one, in which {estimator} cannot compare; use env.rollout.n=8"
        )
    if config.uses_critic and estimator != "gae" and estimator in ADV_ESTIMATORS:
        lines.append(
            f"critic.enable=true trains a critic whose values algorithm.adv_estimator={estimator} does not read; use "
            "critic.enable=null"
        )
    if config.algorithm.use_pf_ppo and estimator != "gae":
        lines.append(f"algorithm.use_pf_ppo has no effect with algorithm.adv_estimator={estimator}, only with gae")
    if config.trainer.critic_warmup > 1 and not config.uses_critic:
        lines.append(
            f"trainer.critic_warmup={config.trainer.critic_warmup} keeps the actor from learning before that step, and "
            f"algorithm.adv_estimator={estimator} has no critic to wait for; use trainer.critic_warmup=0"
        )
    return [*lines, *_run_notices(config.trainer)]


def _run_notices(trainer: TrainerConfig) -> Iterator[str]:
    """About where a run goes on from, and the machine it is on."""
    if trainer.resume_from_path is not None and trainer.resume_mode != "resume_path":
        instead = "starts anew" if trainer.resume_mode == "disable" else "goes on from trainer.default_local_dir"
        yield (
            f"trainer.resume_from_path={trainer.resume_from_path} has no effect with trainer.resume_mode="
            f"{trainer.resume_mode}, which {instead}; use trainer.resume_mode=resume_path"
        )
    last = 0 if trainer.val_only else trainer.total_training_steps
    beyond = [step for step in trainer.profile_steps or () if last is not None and step > last]
    if beyond:
        end = "trainer.val_only=true" if trainer.val_only else f"trainer.total_training_steps={last}"
        yield f"trainer.profile_steps={trainer.profile_steps}: with {end} step {beyond[0]} is never reached or recorded"
    cores, ranks = machine.cpu_count(), trainer.n_gpus_per_node
    if trainer.device == "cpu" and ranks > max(cores, 2) and not os.environ.get("RAY_ADDRESS"):
        yield (
            f"trainer.n_gpus_per_node={ranks} ranks share the {cores} CPU(s) of this machine: they take turns, and "
            f"each is a process with memory of its own; use trainer.n_gpus_per_node={max(cores, 2)}"
        )


def _instead_of_rows(key: str) -> str:
    """What bounds micro-batches where a number of rows does not."""
    prefix, rows, _ = key.partition("micro_batch_size")
    return f": use {prefix}max_token_len_per_gpu" if rows else ""


def _counts(config: PPOTrainerConfig, key: str) -> bool:
    """Whether a key of ``_SWITCHED`` is read, itself or by one that follows it."""
    switch, needed = _SWITCHED[key]
    followers = (other for other in _SWITCHED if _default(other, config.preset) == f"${{{key}}}")
    return _value(config, switch) == needed or any(
        not _changed(config, other) and _counts(config, other) for other in followers
    )


def _changed(config: PPOTrainerConfig, key: str) -> bool:
    """Whether the value differs from the preset's, or else the default; one that follows a key is compared to it."""
    default = _default(key, config.preset)
    followed = _REFERENCE.fullmatch(default) if isinstance(default, str) else None
    return _value(config, key) != (_value(config, followed[1]) if followed else default)


def _leaves(key: str) -> Iterator[str]:
    """The keys below a node; a key that is no node is its own."""
    default = _default(key)
    if isinstance(default, dict) and default:
        for name in default:
            yield from _leaves(f"{key}.{name}")
    else:
        yield key


def _value(config: PPOTrainerConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


@functools.cache
def _default_tree(preset: str) -> dict[str, Any]:
    folder = Path(__file__).parent
    files = [folder / "ppo_trainer.yaml", folder / "preset" / f"{preset}.yaml"]
    merged = OmegaConf.merge(*(OmegaConf.load(file) for file in files if file.is_file()))
    tree = OmegaConf.to_container(merged, resolve=False)
    assert isinstance(tree, dict)
    return tree


def _default(key: str, preset: str = "none") -> Any:
    """The value in ``ppo_trainer.yaml`` under a preset, references to other keys as they are written."""
    return functools.reduce(lambda node, part: node[part], key.split("."), _default_tree(preset))
