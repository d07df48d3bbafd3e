"""The rules of a configuration about single numbers: ranges, sampling, optimisers, schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from verl.trainer.config.schema import OptimConfig, PPOTrainerConfig
from verl.utils.checkpoint.step_folder import steps_there

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"


def at_least(pairs: Iterable[tuple[str, float | None]], lowest: float = 1) -> Iterator[str]:
    """One message for each value below ``lowest``; null is not looked at."""
    for key, value in pairs:
        if value is not None and value < lowest:
            yield f"{key}={value:g} has to be at least {lowest:g}"


def finite(pairs: Iterable[tuple[str, float]]) -> Iterator[str]:
    """One message for each value that is infinite."""
    for key, value in pairs:
        if math.isinf(value):
            yield f"{key}={value:g} has to be finite"


def lora_problems(key: str, rank: int, alpha: float, target_modules: str | list[str]) -> Iterator[str]:
    """Adapters of the model whose settings are below ``key``."""
    yield from at_least([(f"{key}.lora_rank", rank)], lowest=0)
    if rank > 0 and not 0 < alpha < math.inf:
        yield f"{key}.lora_alpha={alpha:g} has to be greater than 0 and finite: it scales what the adapters add"
    if rank > 0 and not target_modules:
        yield f"{key}.target_modules is empty; use all-linear, or a list such as [q_proj,v_proj]"


def check_numbers(config: PPOTrainerConfig) -> Iterator[str]:
    """Coefficients of algorithm and loss."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    if not 0 < algorithm.gigpo.similarity_thresh < 1:
        yield (
            f"algorithm.gigpo.similarity_thresh={algorithm.gigpo.similarity_thresh:g} has to lie between 0 and 1, "
            "such as 0.95"
        )
    for key, value in (("algorithm.gamma", algorithm.gamma), ("algorithm.lam", algorithm.lam)):
        if not 0 <= value <= 1:
            yield f"{key}={value:g} has to lie in [0, 1]"
    if actor.clip_ratio_c <= 1:
        yield f"{_ACTOR}.clip_ratio_c={actor.clip_ratio_c:g} has to be greater than 1, such as 3.0"
    yield from at_least(
        [(f"{_ACTOR}.{name}", getattr(actor, name)) for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")],
        lowest=0,
    )
    for name, instead in (("tis_cap", "null turns the correction off"), ("loss_scale_factor", "or null")):
        value = getattr(actor, name)
        if value is not None and value <= 0:
            yield f"{_ACTOR}.{name}={value:g} has to be greater than 0; {instead}"
    for name, value, usual in (
        ("horizon", algorithm.kl_ctrl.horizon, "10000"),
        ("target_kl", algorithm.kl_ctrl.target_kl, "0.1"),
    ):
        if algorithm.kl_ctrl.type == "adaptive" and value <= 0:
            yield f"algorithm.kl_ctrl.{name}={value:g} has to be greater than 0, such as {usual}"
    yield from at_least(
        [
            ("algorithm.kl_ctrl.kl_coef", algorithm.kl_ctrl.kl_coef),
            ("algorithm.pf_ppo.weight_pow", algorithm.pf_ppo.weight_pow),
            ("algorithm.hgpo.history_length", algorithm.hgpo.history_length),
            ("algorithm.hgpo.episode_advantage_w", algorithm.hgpo.episode_advantage_w),
            ("algorithm.gigpo.step_advantage_w", algorithm.gigpo.step_advantage_w),
            (f"{_ACTOR}.kl_loss_coef", actor.kl_loss_coef),
            (f"{_ACTOR}.invalid_action_penalty_coef", actor.invalid_action_penalty_coef),
        ],
        lowest=0,
    )


def check_finite(config: PPOTrainerConfig) -> Iterator[str]:
    """Weights that would make every loss infinite, and limits that have to come to an end."""
    algorithm, actor, trainer, env = config.algorithm, config.actor_rollout_ref.actor, config.trainer, config.env
    yield from finite(
        [
            ("algorithm.gigpo.step_advantage_w", algorithm.gigpo.step_advantage_w),
            ("algorithm.hgpo.episode_advantage_w", algorithm.hgpo.episode_advantage_w),
            ("algorithm.hgpo.alpha", algorithm.hgpo.alpha),
            ("algorithm.kl_ctrl.kl_coef", algorithm.kl_ctrl.kl_coef),
            ("algorithm.kl_ctrl.target_kl", algorithm.kl_ctrl.target_kl),
            ("algorithm.pf_ppo.weight_pow", algorithm.pf_ppo.weight_pow),
            ("reward_model.overlong_buffer.penalty_factor", config.reward_model.overlong_buffer.penalty_factor),
            (f"{_ACTOR}.entropy_coeff", actor.entropy_coeff),
            (f"{_ACTOR}.kl_loss_coef", actor.kl_loss_coef),
            (f"{_ACTOR}.invalid_action_penalty_coef", actor.invalid_action_penalty_coef),
            (f"{_ACTOR}.policy_loss.ppo_kl_coef", actor.policy_loss.ppo_kl_coef),
            ("trainer.start_timeout", trainer.start_timeout),
            ("trainer.step_timeout", trainer.step_timeout),
            ("env.step_timeout", env.step_timeout),
            ("env.reset_timeout", env.reset_timeout),
            ("env.webshop.build_timeout", env.webshop.build_timeout),
        ]
    )


def check_covariance_losses(config: PPOTrainerConfig) -> Iterator[str]:
    """Shares and bounds of Clip-Cov and KL-Cov."""
    key, loss = f"{_ACTOR}.policy_loss", config.actor_rollout_ref.actor.policy_loss
    for name in ("clip_cov_ratio", "kl_cov_ratio"):
        share = getattr(loss, name)
        if not 0 <= share <= 1:
            yield f"{key}.{name}={share:g} has to lie in [0, 1]: a share of the tokens, such as 0.0002"
    if not loss.clip_cov_lb < loss.clip_cov_ub:
        yield (
            f"{key}.clip_cov_lb={loss.clip_cov_lb:g} has to be less than {key}.clip_cov_ub={loss.clip_cov_ub:g}, such "
            "as 1 and 5"
        )
    yield from at_least([(f"{key}.ppo_kl_coef", loss.ppo_kl_coef)], lowest=0)


def check_lora(config: PPOTrainerConfig) -> Iterator[str]:
    """Adapters of policy and critic."""
    nodes = [("actor_rollout_ref.model", config.actor_rollout_ref.model)]
    nodes += [("critic.model", config.critic.model)] if config.uses_critic else []
    for key, model in nodes:
        yield from lora_problems(key, model.lora_rank, model.lora_alpha, model.target_modules)


def check_sampling(config: PPOTrainerConfig) -> Iterator[str]:
    """Sampling and the engine's limits."""
    rollout = config.actor_rollout_ref.rollout
    validation = rollout.val_kwargs
    if not 0 < rollout.temperature < math.inf:
        yield (
            f"{_ROLLOUT}.temperature={rollout.temperature:g} has to be greater than 0 and finite: the "
            "log-probabilities of an update are taken at it; use 1.0, and "
            f"{_ROLLOUT}.do_sample=false for greedy episodes"
        )
    if validation.do_sample and not 0 < validation.temperature < math.inf:
        yield (
            f"{_ROLLOUT}.val_kwargs.temperature={validation.temperature:g} has to be greater than 0 and finite to "
            "sample; use "
            f"0.4, or {_ROLLOUT}.val_kwargs.do_sample=false"
        )
    for node, values in ((_ROLLOUT, rollout), (f"{_ROLLOUT}.val_kwargs", validation)):
        if not 0 < values.top_p <= 1:
            yield f"{node}.top_p={values.top_p:g} has to lie in (0, 1]"
        if values.top_k < 1 and values.top_k not in (-1, 0):
            yield f"{node}.top_k={values.top_k} has to be at least 1, or -1 for all tokens"
    if not 0 < rollout.gpu_memory_utilization <= 1:
        yield f"{_ROLLOUT}.gpu_memory_utilization={rollout.gpu_memory_utilization:g} has to lie in (0, 1]"
    yield from at_least(
        [
            (f"{_ROLLOUT}.max_num_seqs", rollout.max_num_seqs),
            (f"{_ROLLOUT}.max_steps_per_slice", rollout.max_steps_per_slice),
            (f"{_ROLLOUT}.max_num_batched_tokens", rollout.max_num_batched_tokens),
            (f"{_ROLLOUT}.kv_cache_memory_mb", rollout.kv_cache_memory_mb),
            (f"{_ROLLOUT}.prompt_length", rollout.prompt_length),
            (f"{_ROLLOUT}.response_length", rollout.response_length),
        ]
    )
    if rollout.probe_tolerance is not None and rollout.probe_tolerance <= 0:
        yield f"{_ROLLOUT}.probe_tolerance={rollout.probe_tolerance:g} has to be greater than 0, or null"
    yield from at_least([("env.history_length", config.env.history_length)], lowest=0)


def check_optim(config: PPOTrainerConfig) -> Iterator[str]:
    """Optimisers and their schedules."""
    nodes: list[tuple[str, OptimConfig]] = [(f"{_ACTOR}.optim", config.actor_rollout_ref.actor.optim)]
    if config.uses_critic:
        nodes.append(("critic.optim", config.critic.optim))
    for node, optim in nodes:
        if not 0 <= optim.lr < math.inf:
            yield f"{node}.lr={optim.lr:g} has to be at least 0 and finite"
        if not 0 <= optim.weight_decay < math.inf:
            yield f"{node}.weight_decay={optim.weight_decay:g} has to be at least 0 and finite, such as 0.01"
        if not 0 <= optim.num_cycles < math.inf:
            yield f"{node}.num_cycles={optim.num_cycles:g} has to be at least 0 and finite, such as 0.5"
        if optim.min_lr_ratio is not None and not 0 <= optim.min_lr_ratio <= 1:
            yield f"{node}.min_lr_ratio={optim.min_lr_ratio:g} has to lie in [0, 1], or null for 0"
        if not 0 <= optim.lr_warmup_steps_ratio <= 1:
            yield f"{node}.lr_warmup_steps_ratio={optim.lr_warmup_steps_ratio:g} has to lie in [0, 1]"
        if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
            yield f"{node}.betas={optim.betas} has to be two numbers in [0, 1), such as [0.9,0.999]"


def check_schedule(config: PPOTrainerConfig) -> Iterator[str]:
    """How long the run is, how long it waits, and where it goes on."""
    trainer, env = config.trainer, config.env
    yield from at_least(
        [
            ("trainer.total_epochs", trainer.total_epochs),
            ("trainer.total_training_steps", trainer.total_training_steps),
            ("trainer.max_actor_ckpt_to_keep", trainer.max_actor_ckpt_to_keep),
            ("trainer.max_critic_ckpt_to_keep", trainer.max_critic_ckpt_to_keep),
            ("trainer.start_timeout", trainer.start_timeout),
            ("trainer.step_timeout", trainer.step_timeout),
            ("env.step_timeout", env.step_timeout),
            ("env.reset_timeout", env.reset_timeout),
            ("env.num_workers", env.num_workers),
            ("ray_init.num_cpus", config.ray_init.num_cpus),
            ("trainer.ray_wait_register_center_timeout", trainer.ray_wait_register_center_timeout),
            ("env.max_prompt_chars", env.max_prompt_chars),
            *(("trainer.profile_steps", step) for step in trainer.profile_steps or ()),
        ]
    )
    if "webshop" in env.env_name.lower():
        shop = env.webshop
        limit = None if shop.limit_goals == -1 else shop.limit_goals
        yield from at_least([("env.webshop.num_products", shop.num_products), ("env.webshop.limit_goals", limit)])
        yield from at_least(
            [
                ("env.webshop.validation_goals", shop.validation_goals),
                ("env.webshop.build_timeout", shop.build_timeout),
                ("env.seed", env.seed),
            ],
            lowest=0,
        )
        for name, value in vars(env.resources_per_worker).items():
            if name != "extra" and not 0 <= value < math.inf:
                yield f"env.resources_per_worker.{name}={value:g} has to be at least 0 and finite"
    yield from at_least(
        [
            ("trainer.critic_warmup", trainer.critic_warmup),
            ("data.seed", config.data.seed),
            ("data.dataloader_num_workers", config.data.dataloader_num_workers),
        ],
        lowest=0,
    )
    idle = [step for step in trainer.profile_steps or () if 1 <= step < trainer.critic_warmup]
    if idle:
        yield (
            f"trainer.profile_steps={trainer.profile_steps}: the policy is not updated in step {idle[0]}, before "
            f"trainer.critic_warmup={trainer.critic_warmup}; use trainer.profile_steps=[{trainer.critic_warmup + 2}]"
        )
    if config.uses_critic and config.critic.cliprange_value <= 0:
        yield f"critic.cliprange_value={config.critic.cliprange_value:g} has to be greater than 0, such as 0.5"
    if trainer.val_only and not trainer.val_before_train:
        yield (
            "trainer.val_only=true with trainer.val_before_train=false would validate nothing; use "
            "trainer.val_before_train=true, or trainer.val_only=false to train"
        )
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:  # if it is one: check_paths
        yield (
            "trainer.resume_mode=resume_path needs trainer.resume_from_path=.../global_step_N, got null; "
            + steps_there(Path(trainer.default_local_dir).expanduser())
        )
