"""Settings that have no effect here: accepted, and said once in one line with what replaces them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.trainer.config.schema import PPOTrainerConfig

_PACKED = "rows are always packed"
_CHUNKED = "log-probabilities are computed in chunks"
_BLOCKS = "an FSDP unit is a transformer block"
_CHAT = "environments render the prompts"

NO_EFFECT: dict[str, str] = {
    "data.tokenizer": "the tokenizer is the model's",
    "data.return_raw_input_ids": "true token ids are always kept",
    "data.return_raw_chat": "the chat is always kept",
    "data.return_full_prompt": _CHAT,
    "data.need_tools_kwargs": "tools belong to the environment",
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
    "trainer.validation_data_dir": "validation results are in trainer.run_dir",
    "trainer.max_critic_ckpt_to_keep": "checkpoints are kept whole; use trainer.max_actor_ckpt_to_keep",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "a sequence stays on one rank; use use_dynamic_bsz",
    "actor_rollout_ref.rollout.mode": "episodes always run without a turn barrier",
    "actor_rollout_ref.rollout.chat_scheduler": "the loop is agent_system.multi_turn_rollout",
    "actor_rollout_ref.rollout.use_fire_sampling": "use temperature",
    "actor_rollout_ref.rollout.load_format": "weights come from the trainer",
    "actor_rollout_ref.rollout.layered_summon": "weights are streamed one parameter at a time",
    "actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend": "engines are vllm and hf",
    "actor_rollout_ref.rollout.multi_turn.enable": "every rollout is multi-turn; use env.max_steps",
    "actor_rollout_ref.rollout.multi_turn.max_turns": "use env.max_steps",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": "tools belong to the environment",
    "actor_rollout_ref.rollout.multi_turn.format": "the tokenizer's chat template is used",
    "critic.model.enable_activation_offload": "use critic.model.enable_gradient_checkpointing",
    "critic.model.use_remove_padding": _PACKED,
    "critic.ulysses_sequence_parallel_size": "a sequence stays on one rank; use critic.use_dynamic_bsz",
    "reward_model.launch_reward_fn_async": "rewards come from the environment",
    "reward_model.sandbox_fusion.url": "use custom_reward_function",
    "reward_model.sandbox_fusion.max_concurrent": "use custom_reward_function",
}


def notices(config: PPOTrainerConfig) -> list[str]:
    """What is worth saying about a configuration that can run, one line each."""
    lines = []
    ignored = [f"{key} ({instead})" for key, instead in NO_EFFECT.items() if _changed(config, key)]
    if ignored:
        lines.append("Settings without effect here: " + "; ".join(ignored))
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if _changed(config, "actor_rollout_ref.actor.clip_ratio") and None not in (
        actor.clip_ratio_low,
        actor.clip_ratio_high,
    ):
        lines.append("actor_rollout_ref.actor.clip_ratio counts only where clip_ratio_low or clip_ratio_high is null")
    if rollout.name == "hf" and rollout.tensor_model_parallel_size > 1:
        lines.append(
            "actor_rollout_ref.rollout.tensor_model_parallel_size has no effect with rollout.name=hf: each "
            "rank has an engine of its own"
        )
    if config.env.rollout.n == 1 and config.algorithm.adv_estimator in ("grpo", "gigpo", "hgpo", "rloo"):
        lines.append(
            f"env.rollout.n=1 makes groups of one, in which {config.algorithm.adv_estimator} cannot compare; "
            "use env.rollout.n=8"
        )
    return lines


def _changed(config: PPOTrainerConfig, key: str) -> bool:
    return _value(config, key) != _defaults(key)


def _value(config: PPOTrainerConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


@functools.cache
def _default_tree() -> DictConfig:
    tree = OmegaConf.load(Path(__file__).with_name("ppo_trainer.yaml"))
    assert isinstance(tree, DictConfig)
    return tree


def _defaults(key: str) -> Any:
    return OmegaConf.select(_default_tree(), key)
