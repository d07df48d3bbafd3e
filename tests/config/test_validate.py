"""Each rule is met by a sound configuration and says what would fit when it is not."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.trainer.config import ConfigError, compose_config, default_config, machine, to_dataclass, validate
from verl.trainer.config.convert import known_keys
from verl.trainer.config.derived import derived_lines
from verl.trainer.config.machine import resolve_device, visible_gpus
from verl.trainer.config.names import ENVIRONMENTS
from verl.trainer.config.notices import NO_EFFECT, notices
from verl.trainer.config.validate_files import local_folder, package_folder


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> list[str]:
    """Overrides of a configuration that can run on a machine without a GPU."""
    folder = tmp_path_factory.mktemp("sound")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}", encoding="utf-8")
    for name, rows in (("train", 16), ("test", 8)):
        pq.write_table(pa.table({"prompt": list(range(rows))}), folder / f"{name}.parquet")
    return [
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/test.parquet",
        f"actor_rollout_ref.model.path={folder}/model",
        "data.train_batch_size=16",
        "data.val_batch_size=8",
        "env.env_name=Webshop",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        "critic.ppo_micro_batch_size_per_gpu=8",
    ]


def check(overrides: list[str], *more: str) -> None:
    validate(to_dataclass(compose_config([*overrides, *more])))


def test_a_sound_configuration_passes(sound: list[str]) -> None:
    check(sound)
    check(sound, "actor_rollout_ref.rollout.enable_chunked_prefill=false", "env.rollout.n=8", "algorithm.gamma=0.95")


ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
JUDGED = ["reward_model.enable=true", "reward_model.model.path=a/judge", "reward_model.micro_batch_size_per_gpu=8"]
FILTERED = ["algorithm.filter_groups.enable=true", "env.rollout.n=8"]
OWN_WITH_CRITIC = ["actor_rollout_ref.model.external_lib=json", "algorithm.adv_estimator=mine", "critic.enable=true"]
OVERLONG = ["reward_model.overlong_buffer.enable=true", "reward_model.overlong_buffer.len=100"]
RULES = [
    (["data.train_batch_size=12", "env.rollout.n=2", "trainer.n_gpus_per_node=5", f"{ROLLOUT}.tensor_model_parallel_size=1"],
     "data.train_batch_size*env.rollout.n = 12*2 = 24 does not divide over 5 ranks (trainer.nnodes*trainer.n_gpus_per_node); "
     "use data.train_batch_size=10 or 15"),
    (["data.train_batch_size=1"], "use data.train_batch_size=2"),
    (["data.val_batch_size=null"], "such as data.val_batch_size=128"),
    (["data.train_batch_size=0"], "data.train_batch_size=0 has to be at least 1"),
    (["env.rollout.n=0"], "env.rollout.n=0 has to be at least 1"),
    (["env.rollout.n=-3"], "env.rollout.n=-3 has to be at least 1"),
    ([f"{ROLLOUT}.val_kwargs.n=0"], f"{ROLLOUT}.val_kwargs.n=0 has to be at least 1"),
    ([f"{ROLLOUT}.n=8"], f"use {ROLLOUT}.n=1 env.rollout.n=8"),
    ([f"{ROLLOUT}.tensor_model_parallel_size=4"], "needs 4 ranks, but there are 2"),
    (["trainer.n_gpus_per_node=4", f"{ROLLOUT}.tensor_model_parallel_size=3"], "use one of 1, 2, 4"),
    (["trainer.n_gpus_per_node=4", f"{ACTOR}.fsdp_config.fsdp_size=3"],
     f"{ACTOR}.fsdp_config.fsdp_size=3 does not divide the 4 ranks"),
    (["trainer.n_gpus_per_node=4", f"{ACTOR}.use_kl_loss=true", "actor_rollout_ref.ref.fsdp_config.fsdp_size=3"],
     "(trainer.nnodes*trainer.n_gpus_per_node); use -1 for all, or one of 1, 2"),
    (["trainer.n_gpus_per_node=4", "critic.model.fsdp_config.fsdp_size=3"], "critic.model.fsdp_config.fsdp_size=3 does"),
    (["trainer.n_gpus_per_node=4", *JUDGED, "reward_model.model.fsdp_config.fsdp_size=3"],
     "reward_model.model.fsdp_config.fsdp_size=3 does not divide"),
    ([f"{ACTOR}.ppo_micro_batch_size_per_gpu=null"], f"use {ACTOR}.ppo_micro_batch_size_per_gpu=8"),
    ([f"{ACTOR}.ppo_micro_batch_size=16"], "exclude each other"),
    ([f"{ACTOR}.ppo_micro_batch_size_per_gpu=null", f"{ACTOR}.ppo_micro_batch_size=3"],
     f"use {ACTOR}.ppo_micro_batch_size_per_gpu=1 instead"),
    ([f"{ACTOR}.ppo_micro_batch_size_per_gpu=null", f"{ACTOR}.ppo_micro_batch_size=6"], "is no multiple of"),
    ([f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=null"], f"use {ROLLOUT}.log_prob_micro_batch_size_per_gpu=8"),
    ([f"{ACTOR}.use_kl_loss=true"], "use actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8"),
    (["algorithm.use_kl_in_reward=true"], "use actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8"),
    (["critic.ppo_micro_batch_size_per_gpu=null"], "use critic.ppo_micro_batch_size_per_gpu=8"),
    (["critic.enable=false"], "critic.enable=false takes the values away from algorithm.adv_estimator=gae"),
    ([*OWN_WITH_CRITIC, "critic.ppo_micro_batch_size_per_gpu=null"], "use critic.ppo_micro_batch_size_per_gpu=8"),
    ([*OWN_WITH_CRITIC, "critic.model.path=null"], "critic.model.path is not set"),
    ([f"{ACTOR}.ppo_mini_batch_size=1"], "less than a row for each of the 2 ranks"),
    ([f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=1000"],
     "is less than one row (data.max_prompt_length+data.max_response_length = 1024); use 1024 or more"),
    ([f"{ROLLOUT}.max_model_len=600"], "use null or 1024"),
    ([f"{ROLLOUT}.max_num_batched_tokens=512", f"{ROLLOUT}.enable_chunked_prefill=false"], "use 1024 or more"),
    ([f"{ACTOR}.clip_ratio_c=1.0"], "has to be greater than 1"),
    ([f"{ACTOR}.clip_ratio_low=-0.1"], "has to be at least 0"),
    ([f"{ACTOR}.tis_cap=0"], "null turns the correction off"),
    ([f"{ACTOR}.policy_loss.clip_cov_ratio=-1"], "clip_cov_ratio=-1 has to lie in [0, 1]"),
    ([f"{ACTOR}.policy_loss.kl_cov_ratio=2"], "kl_cov_ratio=2 has to lie in [0, 1]"),
    ([f"{ACTOR}.policy_loss.clip_cov_lb=5", f"{ACTOR}.policy_loss.clip_cov_ub=1"], "such as 1 and 5"),
    ([f"{ACTOR}.policy_loss.ppo_kl_coef=-1"], "has to be at least 0"),
    ([f"{ACTOR}.kl_loss_coef=-1"], "has to be at least 0"),
    ([f"{ACTOR}.invalid_action_penalty_coef=-1"], "has to be at least 0"),
    (["algorithm.kl_ctrl.kl_coef=-1"], "has to be at least 0"),
    (["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0"], "such as 0.1"),
    (["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=0"], "such as 10000"),
    (["algorithm.pf_ppo.weight_pow=-1"], "has to be at least 0"),
    (["algorithm.hgpo.history_length=-1"], "algorithm.hgpo.history_length=-1 has to be at least 0"),
    (["actor_rollout_ref.model.lora_rank=-1"], "has to be at least 0"),
    (["critic.model.lora_rank=-1"], "has to be at least 0"),
    (["critic.model.lora_rank=8", "critic.model.lora_alpha=0"], "has to be greater than 0"),
    (["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.target_modules=[]"], "use all-linear"),
    (["critic.model.path=null"], "critic.model.path is not set"),
    (["critic.model.path=/nowhere/model"], "critic.model.path=/nowhere/model: there is no folder"),
    (["critic.cliprange_value=0"], "critic.cliprange_value=0 has to be greater than 0"),
    (["trainer.critic_warmup=-1"], "has to be at least 0"),
    (["trainer.profile_steps=[3,0]"], "trainer.profile_steps=0 has to be at least 1"),
    (["trainer.profile_steps=[3,5]", "trainer.critic_warmup=5"], "use trainer.profile_steps=[7]"),
    ([f"{ROLLOUT}.temperature=inf"], "greater than 0 and finite"),
    ([f"{ACTOR}.optim.min_lr_ratio=2"], "has to lie in [0, 1], or null"),
    (["algorithm.gigpo.similarity_thresh=1.0"], "has to lie between 0 and 1"),
    (["algorithm.gamma=1.5"], "algorithm.gamma=1.5 has to lie in [0, 1]"),
    (["algorithm.adv_estimator=gigp"], "did you mean gigpo?"),
    (["algorithm.adv_estimator=grpo_passk"], "use env.rollout.n=2 or more"),
    ([f"{ACTOR}.policy_loss.loss_mode=gspoo"], "did you mean gspo?"),
    (["trainer.logger=[console,wandbb]"], "trainer.logger has 'wandbb'"),
    ([f"{ROLLOUT}.temperature=0"], "log-probabilities of an update are taken at it; use 1.0"),
    ([f"{ROLLOUT}.temperature=0", f"{ROLLOUT}.do_sample=false"], "has to be greater than 0"),
    ([f"{ACTOR}.ulysses_sequence_parallel_size=2"], "every sequence stays on one rank; use 1"),
    (["actor_rollout_ref.ref.ulysses_sequence_parallel_size=2"], "every sequence stays on one rank; use 1"),
    (["critic.ulysses_sequence_parallel_size=2"], "every sequence stays on one rank; use 1"),
    (["critic.ppo_mini_batch_size=64"], "leave critic.ppo_mini_batch_size out"),
    (["data.gen_batch_size=8"], "use data.gen_batch_size=null"),
    ([*FILTERED, "data.gen_batch_size=8"], "is less than the data.train_batch_size=16 tasks"),
    ([*FILTERED, "env.rollout.n=1"], "makes groups of one; use env.rollout.n=8"),
    ([*FILTERED, "algorithm.filter_groups.max_num_gen_batches=0"], "has to be at least 1"),
    ([*FILTERED, "data.train_batch_size=8", "data.gen_batch_size=16", "algorithm.filter_groups.surplus=carry"],
     "could carry a whole batch of data.train_batch_size=8; use data.gen_batch_size=15 or less"),
    ([*FILTERED, f"{ROLLOUT}.top_p=0.9", "algorithm.filter_groups.surplus=carry"], "use top_p=1.0 and top_k=-1"),
    (["reward_model.overlong_buffer.enable=true"], "between 1 and data.max_response_length=512"),
    ([*OVERLONG, "reward_model.overlong_buffer.len=513"], "use 102"),
    ([*OVERLONG, "reward_model.overlong_buffer.penalty_factor=-1"], "has to be at least 0, such as 1.0"),
    (["trainer.val_only=true", "trainer.val_before_train=false"], "use trainer.val_before_train=true"),
    (["env.env_name=alfworld/AlfredTWEnv"],
     "env.env_name=alfworld/AlfredTWEnv is not a known environment; there are webshop, such as env.env_name=Webshop"),
    (["env.env_name=Webshp"], "did you mean webshop? There are webshop"),
    (["env.env_name=notwebshopatall"], "env.env_name=notwebshopatall is not a known environment"),
    (["env.env_name=chess"], "goes into actor_rollout_ref.model.external_lib"),
    ([f"{ROLLOUT}.val_kwargs.do_sample=true"], "use 0.4"),
    ([f"{ROLLOUT}.top_p=0"], "has to lie in (0, 1]"),
    ([f"{ROLLOUT}.gpu_memory_utilization=1.5"], "has to lie in (0, 1]"),
    ([f"{ACTOR}.optim.betas=[0.9]"], "two numbers in [0, 1)"),
    ([f"{ACTOR}.strategy=megatron"], f"use {ACTOR}.strategy=fsdp"),
    (["actor_rollout_ref.hybrid_engine=false"], "use true"),
    (["reward_model.enable=true"], "reward_model.model.path is not set"),
    ([*JUDGED, "reward_model.model.path=/nowhere"], "there is no config.json in /nowhere"),
    ([*JUDGED, "reward_model.micro_batch_size_per_gpu=null"], "use reward_model.micro_batch_size_per_gpu=8"),
    ([*JUDGED, "reward_model.max_length=0"], "at least 1, or null for no limit"),
    ([*JUDGED, "reward_model.ulysses_sequence_parallel_size=2"], "every sequence stays on one rank; use 1"),
    ([*JUDGED, "custom_reward_function.path=pyproject.toml"], "exclude each other"),
    (["reward_model.strategy=megatron"], "use reward_model.strategy=fsdp"),
    (["reward_model.reward_manager=naive"], "use episode"),
    (["trainer.default_hdfs_dir=hdfs://x"], "use null"),
    ([f"{ACTOR}.checkpoint.contents=[model]"], "lacks optimizer, extra"),
    (["actor_rollout_ref.model.external_lib=missing.py"],
     "actor_rollout_ref.model.external_lib=missing.py: there is no file /"),
    (["actor_rollout_ref.model.external_lib=[json,no_such_module.a]"],
     "actor_rollout_ref.model.external_lib=no_such_module.a: there is no such module; give a file (ending in .py)"),
    (["critic.model.external_lib=missing.py"], "critic.model.external_lib=missing.py: there is no file /"),
    ([*JUDGED, "reward_model.model.external_lib=a/b"], "reward_model.model.external_lib=a/b: there is no such module"),
    (["data.custom_cls.path=missing.py"], "data.custom_cls.path=missing.py: there is no such file"),
    (["data.custom_cls.path=missing.py"], "data.custom_cls.name is not set"),
    (["custom_reward_function.path=missing.py"], "custom_reward_function.path=missing.py: there is no such file"),
    (["critic.model.tokenizer_path=/nowhere"], "critic.model.tokenizer_path=/nowhere: there is no folder /nowhere"),
    ([*JUDGED, "reward_model.model.input_tokenizer=/nowhere"], "reward_model.model.input_tokenizer=/nowhere: there is"),
    (["trainer.resume_mode=resume_path", "trainer.resume_from_path=/tmp"], "must end in global_step_<number>"),
    (["trainer.resume_mode=resume_path"], "needs trainer.resume_from_path=.../global_step_N"),
    (["trainer.resume_mode=resume_path", "trainer.resume_from_path=/nowhere/global_step_3"], "there is no such folder"),
    (["trainer.total_epochs=0"], "has to be at least 1"),
    (["actor_rollout_ref.model.path=null"], "is not set"),
    (["actor_rollout_ref.model.path=/nowhere/model"], "there is no folder /nowhere/model"),
    (["actor_rollout_ref.model.path=pkg://gigpo/nothing"], "there is no folder"),
    (["data.train_files=/nowhere/train.parquet"], "write it with python -m examples.data_preprocess.prepare"),
    (["data.train_batch_size=32"], "holds 16 rows, less than one batch of data.train_batch_size=32; write more with"),
    (["env.env_name=Webshop", "env.webshop.data_dir=/nowhere"], "null for the embedded catalogue"),
    (["custom_reward_function.path=/nowhere.py"], "there is no such file"),
    (["env.env_name=Webshop", "env.webshop.num_products=0"], "env.webshop.num_products=0 has to be at least 1"),
    (["env.env_name=Webshop", "env.webshop.limit_goals=0"], "env.webshop.limit_goals=0 has to be at least 1"),
    (["env.env_name=Webshop", "env.webshop.validation_goals=-1"], "has to be at least 0"),
    (["env.env_name=Webshop", "env.webshop.noun_source=/nowhere.json"], "the path of a JSON file"),
    ([f"{ACTOR}.optim.lr=inf"], "has to be at least 0 and finite"),
    (["trainer.run_dir=''"], "trainer.run_dir is empty"),
    (["trainer.project_name=../../x"], "trainer.project_name='../../x' would lead out of the folder checkpoints/"),
    (["trainer.project_name=/x"], "trainer.default_local_dir for a folder elsewhere"),
    (["trainer.experiment_name=a/../../../x"], "trainer.experiment_name='a/../../../x' would lead out"),
    (["trainer.experiment_name=''"], "names no folder of its own"),
    (["trainer.experiment_name=a/"], "names no folder of its own"),
    (["trainer.experiment_name=\"a\nb\""], "characters that no name of a folder should have"),
    (["data.seed=-1"], "data.seed=-1 has to be at least 0"),
    (["env.seed=-1"], "env.seed=-1 has to be at least 0"),
    (["data.dataloader_num_workers=-1"], "data.dataloader_num_workers=-1 has to be at least 0"),
    (["env.max_prompt_chars=0"], "env.max_prompt_chars=0 has to be at least 1"),
    (["env.resources_per_worker.num_cpus=-1"], "env.resources_per_worker.num_cpus=-1 has to be at least 0"),
    (["algorithm.gigpo.step_advantage_w=-1"], "algorithm.gigpo.step_advantage_w=-1 has to be at least 0"),
    (["algorithm.gigpo.step_advantage_w=inf"], "algorithm.gigpo.step_advantage_w=inf has to be finite"),
    ([f"{ACTOR}.kl_loss_coef=inf"], f"{ACTOR}.kl_loss_coef=inf has to be finite"),
    (["env.step_timeout=inf"], "env.step_timeout=inf has to be finite"),
    (["trainer.ray_wait_register_center_timeout=0"], "trainer.ray_wait_register_center_timeout=0 has to be at least 1"),
    ([f"{ACTOR}.optim.weight_decay=-0.1"], f"{ACTOR}.optim.weight_decay=-0.1 has to be at least 0"),
    (["critic.optim.num_cycles=-1"], "critic.optim.num_cycles=-1 has to be at least 0"),
    ([f"{ROLLOUT}.response_length=0"], f"{ROLLOUT}.response_length=0 has to be at least 1"),
    ([f"{ROLLOUT}.max_num_batched_tokens=0"], f"{ROLLOUT}.max_num_batched_tokens=0 has to be at least 1"),
    ([f"{ROLLOUT}.kv_cache_memory_mb=0"], f"{ROLLOUT}.kv_cache_memory_mb=0 has to be at least 1"),
    ([f"{ROLLOUT}.probe_tolerance=0"], f"{ROLLOUT}.probe_tolerance=0 has to be greater than 0, or null"),
    (["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=inf"], "lora_alpha=inf has to be greater"),
    ([*JUDGED, "reward_model.use_dynamic_bsz=true", "reward_model.forward_max_token_len_per_gpu=0"],
     "reward_model.forward_max_token_len_per_gpu=0 has to be at least 1"),
    (["data.val_files=[]"], "data.val_files names no file; write one with"),
    (["env.webshop.cache_dir=''"], "env.webshop.cache_dir is empty; use a folder"),
    (["trainer.compile_cache_dir=''"], "trainer.compile_cache_dir is empty; use a folder"),
    (["trainer.validation_data_dir=/etc/hostname"], "trainer.validation_data_dir=/etc/hostname is a file; use a folder"),
]


@pytest.mark.parametrize(("overrides", "said"), RULES, ids=[" ".join(one)[:70] for one, _ in RULES])
def test_rules_say_what_would_fit(sound: list[str], overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(sound, *overrides)
    assert said in str(caught.value)


def test_the_steps_that_a_run_can_go_on_from_are_named(sound: list[str], tmp_path: Path) -> None:
    for step in range(1, 11):
        (tmp_path / f"global_step_{step}").mkdir()
    there = f"; {tmp_path} has {', '.join(f'global_step_{step}' for step in range(3, 11))} and 2 earlier"
    mode = "trainer.resume_mode=resume_path"
    for overrides in ([f"trainer.resume_from_path={tmp_path}"], [f"trainer.resume_from_path={tmp_path}/int"],
                      [f"trainer.resume_from_path={tmp_path}/global_step_70"],
                      [f"trainer.default_local_dir={tmp_path}"]):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            check(sound, mode, *overrides)
        assert str(caught.value).endswith(there)
    check(sound, mode, f"trainer.resume_from_path={tmp_path}/global_step_7")


def test_names_with_folders_blanks_and_letters_of_any_language_are_fine(sound: list[str]) -> None:
    check(sound, "trainer.project_name='größe/zwei'", "trainer.experiment_name='a b..c'")


def test_what_is_only_explained_needs_no_parquet_files_yet(sound: list[str]) -> None:
    check(sound, "explain=true", "data.train_files=/nowhere/train.parquet")


def test_all_problems_are_reported_together(sound: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check(sound, f"{ROLLOUT}.n=2", "algorithm.gamma=2")
    lines = str(caught.value).splitlines()
    assert lines[0] == "2 settings do not work:" and len(lines) == 3


def test_dynamic_batches_need_no_micro_batch_size(sound: list[str]) -> None:
    check(sound, f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_micro_batch_size_per_gpu=null", f"{ACTOR}.use_kl_loss=true",
          f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=null", "critic.ppo_micro_batch_size_per_gpu=null")


def test_estimators_without_a_critic_need_none_of_its_settings(sound: list[str]) -> None:
    check(sound, "algorithm.adv_estimator=gigpo", "env.rollout.n=8", "critic.ppo_micro_batch_size_per_gpu=null")


def test_an_estimator_of_the_users_own_may_have_a_critic(sound: list[str]) -> None:
    def uses_critic(*overrides: str) -> bool:
        config = to_dataclass(compose_config([*sound, *overrides]))
        validate(config)
        return config.uses_critic

    own = OWN_WITH_CRITIC[:2]
    assert [uses_critic(*own), uses_critic(*own, "critic.enable=false"), uses_critic(*OWN_WITH_CRITIC)] == [0, 0, 1]
    assert uses_critic() and uses_critic("critic.enable=true")  # gae


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], 4 * 8),  # validation: 3 tasks once
        (["algorithm.adv_estimator=remax"], 4 * 9),  # and a greedy episode of each task
        (["data.gen_batch_size=6"], 6 * 8),
        (["data.val_batch_size=40"], 40),
        (["data.val_batch_size=20", "actor_rollout_ref.rollout.val_kwargs.n=2"], 40),
    ],
)
def test_a_rollout_has_a_request_of_each_episode_under_way(overrides: list[str], expected: int) -> None:
    sizes = ["data.train_batch_size=4", "env.rollout.n=8", "data.val_batch_size=3"]
    config = to_dataclass(compose_config([*sizes, *overrides]))
    assert config.requests_at_once == expected
    if config.data.val_batch_size == 3:
        assert dict(derived_lines(config))["training environments"].startswith(f"{expected} (")


@pytest.mark.parametrize("key", ["env.rollout.n", f"{ROLLOUT}.val_kwargs.n"])
@pytest.mark.parametrize("size", [0, -1])
def test_a_number_of_episodes_below_one_is_refused_wherever_it_is_asked_for(key: str, size: int) -> None:
    config = to_dataclass(compose_config([f"{key}={size}"]))
    with pytest.raises(ValueError, match=rf"{re.escape(key)}={size} has to be at least 1"):
        _ = config.requests_at_once
    assert list(derived_lines(config)) == []


def test_own_names_are_accepted_with_a_module_that_registers_them(sound: list[str]) -> None:
    check(sound, "algorithm.adv_estimator=mine", "env.env_name=chess", "actor_rollout_ref.model.external_lib=json.tool")


def test_environment_names_are_those_that_are_registered() -> None:
    pytest.importorskip("ray")
    from agent_system.environments import env_manager, registry

    shipped = [name for name, maker in registry._MAKERS.items() if maker.__module__ == env_manager.__name__]
    assert list(ENVIRONMENTS) == shipped


def test_the_hf_engine_counts_as_one_rank_per_engine(sound: list[str]) -> None:
    hf = [*sound, f"{ROLLOUT}.name=hf", f"{ROLLOUT}.tensor_model_parallel_size=3"]
    check(hf)
    config = to_dataclass(compose_config(hf))
    assert config.actor_rollout_ref.rollout.ranks_per_engine == 1
    assert dict(derived_lines(config))["rollout engines"] == "2 x hf with tensor parallel 1"


def test_settings_that_follow_the_actor_are_one_problem(sound: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check(sound, f"{ACTOR}.ulysses_sequence_parallel_size=2")
    assert "settings do not work" not in str(caught.value)
    check(sound, f"{ACTOR}.ppo_mini_batch_size=64")
    check(sound, "critic.ppo_mini_batch_size=64", "algorithm.adv_estimator=gigpo", "env.rollout.n=8")
    check(sound, "data.gen_batch_size=16")
    more = [*FILTERED, "data.train_batch_size=8", "data.gen_batch_size=12"]
    check(sound, *more)
    check(sound, *more, "algorithm.filter_groups.surplus=carry")
    check(sound, *OVERLONG)
    check(sound, *JUDGED)
    check(sound, "algorithm.adv_estimator=remax")


def test_a_broken_parquet_file_is_named(sound: list[str], tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ConfigError, match="broken.parquet is no readable parquet file"):
        check(sound, f"data.val_files={tmp_path}/broken.parquet")


def test_a_model_folder_without_a_model_is_named(sound: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no config.json"):
        check(sound, f"actor_rollout_ref.model.path={tmp_path}")


def test_hub_names_and_remote_paths_are_left_to_the_loader(tmp_path: Path) -> None:
    assert local_folder("Qwen/Qwen2.5-1.5B-Instruct") is None
    assert local_folder("hdfs://cluster/model") is None
    assert local_folder(str(tmp_path)) == tmp_path
    assert local_folder("./model") == Path("model")


def test_package_paths_are_found_without_importing() -> None:
    assert package_folder("pkg://verl.trainer.config/preset").joinpath("embedded.yaml").is_file()


def test_gpus_are_counted(sound: list[str], monkeypatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("verl.trainer.config.machine.visible_gpus", lambda: 0)
    with pytest.raises(ConfigError, match="use trainer.device=cpu, or preset=embedded"):
        check(sound, "trainer.device=cuda")
    monkeypatch.setattr("verl.trainer.config.machine.visible_gpus", lambda: 1)
    with pytest.raises(ConfigError, match=r"n_gpus_per_node=1 and .*tensor_model_parallel_size=1"):
        check(sound, "trainer.device=cuda")
    monkeypatch.setattr("verl.trainer.config.machine.visible_gpus", lambda: 2)
    check(sound, "trainer.device=cuda")
    monkeypatch.setattr("verl.trainer.config.machine.visible_gpus", lambda: 0)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")  # the GPUs are elsewhere
    check(sound, "trainer.device=cuda")


def test_auto_means_cuda_where_there_is_a_gpu(monkeypatch) -> None:
    config = default_config("trainer.device=auto")
    for gpus, device in ((0, "cpu"), (2, "cuda")):
        monkeypatch.setattr("verl.trainer.config.machine.visible_gpus", lambda gpus=gpus: gpus)
        assert resolve_device(config).trainer.device == device
    assert resolve_device(default_config()).trainer.device == "cuda"


def test_cuda_visible_devices_hides_gpus(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == 0


def test_settings_without_effect_are_said_once_with_what_replaces_them() -> None:
    assert notices(default_config()) == notices(default_config("preset=embedded")) == []
    lines = notices(default_config("data.return_raw_chat=true", "actor_rollout_ref.model.use_remove_padding=true"))
    assert lines == ["Settings without effect here: data.return_raw_chat (the chat is always kept); "
                     "actor_rollout_ref.model.use_remove_padding (rows are always packed)"]
    swap = "actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space"
    assert notices(default_config(f"{swap}=4")) == [
        f"Settings without effect here: {swap} (vLLM swaps nothing to host memory any more)"
    ]
    known = set(known_keys()) | {swap, "actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend"}
    assert set(NO_EFFECT) <= known


def test_steps_to_profile_that_are_never_reached_are_said() -> None:
    assert notices(default_config("trainer.profile_steps=[2,4]", "trainer.total_training_steps=4")) == []
    assert notices(default_config("trainer.profile_steps=[2,99]")) == []  # how many there are depends on the data
    (line,) = notices(default_config("trainer.profile_steps=[2,99]", "trainer.total_training_steps=4"))
    assert "with trainer.total_training_steps=4 step 99 is never reached" in line
    (line,) = notices(default_config("trainer.profile_steps=[2]", "trainer.val_only=true"))
    assert "with trainer.val_only=true step 2 is never reached" in line


def test_a_node_without_effect_names_the_keys_that_were_changed(sound: list[str]) -> None:
    config = to_dataclass(compose_config(sound))  # its model path and what follows that are no change
    assert notices(config) == []
    (line,) = notices(default_config("reward_model.model.fsdp_config.fsdp_size=2", "env.search.topk=5", "critic.rollout_n=4"))
    assert "reward_model.model.fsdp_config.fsdp_size (rewards" in line and "env.search.topk (no such" in line
    assert "critic.rollout_n (the group size is env.rollout.n)" in line and line.count("(") == 3
    assert notices(default_config("env.search.topk=5", "actor_rollout_ref.model.external_lib=mine")) == []


def test_code_of_roles_that_a_run_has_not_is_not_looked_for(sound: list[str], tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit", encoding="utf-8")  # found, not run
    monkeypatch.chdir(tmp_path)
    unused = ["critic.model.external_lib=missing.py", "reward_model.model.external_lib=missing.py",
              "critic.model.tokenizer_path=/nowhere", "algorithm.adv_estimator=grpo"]
    check(sound, *unused, "actor_rollout_ref.model.external_lib=[mine.py,json]", "data.custom_cls.path=mine.py",
          "data.custom_cls.name=Rows", "custom_reward_function.path=mine.py")


def test_a_checkpoint_that_is_not_resumed_is_said() -> None:
    path = "trainer.resume_from_path=runs/global_step_3"
    (line,) = notices(default_config(path))
    assert line.startswith(f"{path} has no effect with trainer.resume_mode=auto, which goes on from trainer.default")
    assert "which starts anew" in notices(default_config(path, "trainer.resume_mode=disable"))[0]
    assert notices(default_config(path, "trainer.resume_mode=resume_path")) == []


def test_more_ranks_than_cores_are_said(monkeypatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(machine, "cpu_count", lambda: 4)
    on_cpu = ["trainer.device=cpu", "env.rollout.n=2"]
    assert notices(default_config(*on_cpu, "trainer.n_gpus_per_node=4")) == []
    (line,) = notices(default_config(*on_cpu, "trainer.n_gpus_per_node=32"))
    assert "trainer.n_gpus_per_node=32 ranks share the 4 CPU(s)" in line and "use trainer.n_gpus_per_node=4" in line
    assert notices(default_config("env.rollout.n=2", "trainer.n_gpus_per_node=32")) == []  # GPUs have a rule
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert notices(default_config(*on_cpu, "trainer.n_gpus_per_node=32")) == []


def test_other_notices() -> None:
    assert "counts only where" in notices(default_config(f"{ACTOR}.clip_ratio=0.3"))[0]
    assert "no effect with rollout.name=hf" in notices(default_config(f"{ROLLOUT}.name=hf"))[0]
    for estimator in ("gigpo", "reinforce_plus_plus_baseline"):
        assert "groups of one" in notices(default_config(f"algorithm.adv_estimator={estimator}"))[0]
    without_critic = "algorithm.adv_estimator=reinforce_plus_plus"
    assert "only with gae" in notices(default_config("algorithm.use_pf_ppo=true", without_critic))[0]
    assert "only with gae" in notices(default_config("algorithm.use_pf_ppo=true", *OWN_WITH_CRITIC))[0]
    assert "does not read; use critic.enable=null" in notices(default_config("critic.enable=true", without_critic))[0]
    assert notices(default_config("trainer.critic_warmup=5", *OWN_WITH_CRITIC)) == []
    assert "no critic to wait for" in notices(default_config("trainer.critic_warmup=5", without_critic))[0]
    assert notices(default_config("algorithm.use_pf_ppo=true", "trainer.critic_warmup=5")) == []
