"""Every key that users of verl-agent know is there, with the default they know."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl.trainer.config import CONFIG_DIR, PPOTrainerConfig, compose_config, default_config
from verl.trainer.config.convert import known_keys
from verl.trainer.config.names import ADV_ESTIMATORS, POLICY_LOSSES, TRACKERS

# The table of defaults, stated by itself: node, then "key value" pairs. Interpolations are given as their result for the
# defaults (max_prompt_length 512, max_response_length 512).
DEFAULTS = {
    "data": dict(
        tokenizer=None, use_shm=False, prompt_key="prompt", reward_fn_key="data_source", max_prompt_length=512,
        max_response_length=512, train_batch_size=1024, val_batch_size=None, return_raw_input_ids=False,
        return_raw_chat=False, return_full_prompt=False, shuffle=True, filter_overlong_prompts=False,
        filter_overlong_prompts_workers=1, truncation="error", image_key="images", video_key="videos",
        trust_remote_code=False, seed=1, gen_batch_size=None, dataloader_num_workers=8, cache_dir="~/.cache/verl/rlhf",
        need_tools_kwargs=False, filter_prompts=True, chat_template_func=None,
    ),
    "data.custom_cls": dict(path=None, name=None),
    "actor_rollout_ref": dict(hybrid_engine=True),
    "actor_rollout_ref.model": dict(
        use_shm=False, external_lib=None, override_config={}, enable_gradient_checkpointing=True,
        enable_activation_offload=False, use_remove_padding=False, lora_rank=0, lora_alpha=16,
        target_modules="all-linear", use_liger=False, use_fused_kernels=False, trust_remote_code=False,
    ),
    "actor_rollout_ref.actor": dict(
        strategy="fsdp", ppo_mini_batch_size=256, ppo_micro_batch_size=None, ppo_micro_batch_size_per_gpu=None,
        use_dynamic_bsz=False, ppo_max_token_len_per_gpu=16384, grad_clip=1.0, clip_ratio=0.2, clip_ratio_low=0.2,
        clip_ratio_high=0.2, clip_ratio_c=3.0, loss_agg_mode="token-mean", entropy_coeff=0.001,
        use_invalid_action_penalty=True, invalid_action_penalty_coef=0.1, use_kl_loss=False, use_torch_compile=True,
        kl_loss_coef=0.001, kl_loss_type="low_var_kl", ppo_epochs=1, shuffle=False, ulysses_sequence_parallel_size=1,
        tis_cap=None,
    ),
    "actor_rollout_ref.actor.policy_loss": dict(loss_mode="vanilla"),
    "actor_rollout_ref.actor.checkpoint": dict(contents=["model", "optimizer", "extra"]),
    "actor_rollout_ref.actor.optim": dict(
        lr=1e-6, lr_warmup_steps=-1, lr_warmup_steps_ratio=0.0, min_lr_ratio=0.0, num_cycles=0.5,
        warmup_style="constant", total_training_steps=-1, weight_decay=0.01, betas=[0.9, 0.999],
    ),
    "actor_rollout_ref.actor.fsdp_config": dict(
        param_offload=False, optimizer_offload=False, offload_policy=False, reshard_after_forward=True, fsdp_size=-1,
    ),
    "actor_rollout_ref.actor.fsdp_config.wrap_policy": dict(min_num_params=0, transformer_layer_cls_to_wrap=None),
    "actor_rollout_ref.actor.fsdp_config.mixed_precision": dict(
        param_dtype="bf16", reduce_dtype="fp32", buffer_dtype="fp32"
    ),
    "actor_rollout_ref.ref": dict(
        strategy="fsdp", use_torch_compile=True, log_prob_micro_batch_size=None, log_prob_micro_batch_size_per_gpu=None,
        log_prob_use_dynamic_bsz=False, log_prob_max_token_len_per_gpu=16384, ulysses_sequence_parallel_size=1,
    ),
    "actor_rollout_ref.ref.fsdp_config": dict(param_offload=False, reshard_after_forward=True),
    "actor_rollout_ref.ref.fsdp_config.wrap_policy": dict(min_num_params=0),
    "actor_rollout_ref.rollout": dict(
        name="vllm", mode="sync", chat_scheduler=None, temperature=1.0, top_k=-1, top_p=1, use_fire_sampling=False,
        prompt_length=512, response_length=512, dtype="bfloat16", gpu_memory_utilization=0.5, ignore_eos=False,
        enforce_eager=True, free_cache_engine=True, load_format="dummy_dtensor", layered_summon=False,
        tensor_model_parallel_size=2, max_num_batched_tokens=8192, max_model_len=None, max_num_seqs=1024,
        log_prob_micro_batch_size=None, log_prob_micro_batch_size_per_gpu=None, log_prob_use_dynamic_bsz=False,
        log_prob_max_token_len_per_gpu=16384, disable_log_stats=True, enable_chunked_prefill=True, do_sample=True, n=1,
    ),
    "actor_rollout_ref.rollout.engine_kwargs": dict(vllm={"swap_space": None}, sglang={"attention_backend": None}),
    "actor_rollout_ref.rollout.val_kwargs": dict(top_k=-1, top_p=1.0, temperature=0, n=1, do_sample=False),
    "actor_rollout_ref.rollout.multi_turn": dict(enable=False, max_turns=None, tool_config_path=None, format="chatml"),
    "critic": dict(
        rollout_n=1, strategy="fsdp", ppo_mini_batch_size=256, ppo_micro_batch_size=None,
        ppo_micro_batch_size_per_gpu=None, forward_micro_batch_size=None, forward_micro_batch_size_per_gpu=None,
        use_dynamic_bsz=False, ppo_max_token_len_per_gpu=32768, forward_max_token_len_per_gpu=32768,
        ulysses_sequence_parallel_size=1, ppo_epochs=1, shuffle=False, grad_clip=1.0, cliprange_value=0.5,
        loss_agg_mode="token-mean",
    ),
    "critic.optim": dict(
        lr=1e-5, lr_warmup_steps_ratio=0.0, min_lr_ratio=None, warmup_style="constant", total_training_steps=-1,
        weight_decay=0.01,
    ),
    "critic.model": dict(
        use_shm=False, override_config={}, external_lib=None, enable_gradient_checkpointing=True,
        enable_activation_offload=False, use_remove_padding=False, trust_remote_code=False, lora_rank=0, lora_alpha=16,
        target_modules="all-linear",
    ),
    "critic.model.fsdp_config": dict(
        param_offload=False, optimizer_offload=False, offload_policy=False, reshard_after_forward=True, fsdp_size=-1,
    ),
    "critic.checkpoint": dict(contents=["model", "optimizer", "extra"]),
    "reward_model": dict(
        enable=False, strategy="fsdp", micro_batch_size=None, micro_batch_size_per_gpu=None, max_length=None,
        ulysses_sequence_parallel_size=1, use_dynamic_bsz=False, forward_max_token_len_per_gpu=32768,
        reward_manager="episode", launch_reward_fn_async=False,
    ),
    "reward_model.model": dict(
        use_shm=False, external_lib=None, use_remove_padding=False, use_fused_kernels=False, trust_remote_code=False,
    ),
    "reward_model.model.fsdp_config": dict(param_offload=False, reshard_after_forward=True, fsdp_size=-1),
    "reward_model.sandbox_fusion": dict(url=None, max_concurrent=64),
    "custom_reward_function": dict(path=None, name="compute_score"),
    "algorithm": dict(
        gamma=1.0, lam=1.0, adv_estimator="gae", norm_adv_by_std_in_grpo=True, use_kl_in_reward=False, kl_penalty="kl",
        use_pf_ppo=False, compute_mean_std_cross_steps=True,
    ),
    "algorithm.kl_ctrl": dict(type="fixed", kl_coef=0.001, horizon=10000, target_kl=0.1),
    "algorithm.pf_ppo": dict(reweight_method="pow", weight_pow=2.0),
    "algorithm.gigpo": dict(
        step_advantage_w=1.0, mode="mean_norm", enable_similarity=False, similarity_thresh=0.95
    ),
    "algorithm.filter_groups": dict(enable=False, max_num_gen_batches=10, surplus="cut"),
    "trainer": dict(
        balance_batch=True, total_epochs=30, total_training_steps=None, project_name="verl_examples",
        experiment_name="gsm8k", logger=["console", "wandb"], log_val_generations=0, profile_steps=None,
        rollout_data_dir=None, validation_data_dir=None, nnodes=1, n_gpus_per_node=8, save_freq=-1, resume_mode="auto", resume_from_path=None,
        val_before_train=True, val_only=False, test_freq=-1, critic_warmup=0, default_hdfs_dir=None,
        del_local_ckpt_after_load=False, default_local_dir="checkpoints/verl_examples/gsm8k",
        max_actor_ckpt_to_keep=None, max_critic_ckpt_to_keep=None, ray_wait_register_center_timeout=300, device="cuda",
    ),
    "ray_init": dict(num_cpus=None),
    "env": dict(env_name="alfworld/AlfredTWEnv", seed=0, max_steps=50, history_length=2),
    "env.resources_per_worker": dict(num_cpus=0.1, num_gpus=0),
    "env.rollout": dict(n=1),
    "env.alfworld": dict(eval_dataset="eval_in_distribution"),
    "env.search": dict(log_requests=False, search_url="http://127.0.0.1:8000/retrieve", topk=3, timeout=60),
    "env.sokoban": dict(dim_room=[6, 6], num_boxes=1, search_depth=30, mode="tiny_rgb_array"),
    "env.webshop": dict(use_small=True, human_goals=False),
}
# Keys whose default is a path of the user's; only their presence matters.
PATHS = (
    "data.train_files", "data.val_files", "actor_rollout_ref.model.path", "critic.model.path",
    "critic.model.tokenizer_path", "reward_model.model.path", "reward_model.model.input_tokenizer",
)


@pytest.fixture(scope="module")
def defaults() -> PPOTrainerConfig:
    return default_config()


@pytest.mark.parametrize("node", DEFAULTS)
def test_defaults_are_the_known_ones(node: str, defaults: PPOTrainerConfig) -> None:
    value = defaults
    for part in node.split("."):
        value = getattr(value, part)
    expected = DEFAULTS[node]
    assert {key: getattr(value, key) for key in expected} == expected


def test_path_keys_are_there() -> None:
    assert set(PATHS) <= set(known_keys())


def test_yaml_and_schema_have_the_same_keys() -> None:
    def names(node: dict, path: str = "") -> set[str]:
        found = set()
        for key, value in node.items():
            found.add(path + key)
            if isinstance(value, dict) and any(one.startswith(f"{path}{key}.") for one in known_keys()):
                found |= names(value, f"{path}{key}.")
        return found

    assert names(OmegaConf.to_container(compose_config(), resolve=True)) == set(known_keys())


def test_every_key_has_a_comment() -> None:
    lines = (CONFIG_DIR / "ppo_trainer.yaml").read_text(encoding="utf-8").splitlines()
    settings = [line for line in lines if re.match(r"\s*\w+: \S", line)]
    assert len(settings) > 252
    assert [line for line in settings if " # " not in line] == []


def test_no_defaults_in_the_schema() -> None:
    from verl.trainer.config import schema

    for name in schema.__all__:
        for field in dataclasses.fields(getattr(schema, name)):
            assert field.name == "extra" or field.default is dataclasses.MISSING, f"{name}.{field.name}"


def test_config_package_needs_neither_torch_nor_ray() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from verl.trainer.config import default_config, validate\n"
        "import verl.trainer.config.explain\n"
        "config = default_config('preset=embedded')\n"
        "try: validate(config)\n"
        "except ValueError: pass\n"
        "print(sorted({'torch', 'ray', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True,
                          cwd=Path(__file__).resolve().parents[2])
    assert done.stdout.strip() == "[]"


def test_names_are_those_of_the_registries() -> None:
    import verl.trainer.ppo.policy_loss  # noqa: F401  (registers the losses)
    from verl.trainer.ppo.advantage.registry import AdvantageEstimator
    from verl.trainer.ppo.policy_loss.registry import _POLICY_LOSSES
    from verl.utils.tracking import Tracking

    assert set(ADV_ESTIMATORS) == {one.value for one in AdvantageEstimator}
    assert set(POLICY_LOSSES) <= set(_POLICY_LOSSES)
    assert set(TRACKERS) == set(Tracking.supported_backend)
