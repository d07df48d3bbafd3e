"""Overrides, types, presets and the messages for mistakes."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from verl.trainer.config import ConfigError, compose_config, default_config, node_from_dict, to_dataclass
from verl.trainer.config.compose import compose
from verl.trainer.config.prepare import to_yaml, write_resolved
from verl.trainer.config.schema import PPOTrainerConfig, WebshopConfig


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.trian_batch_size=2", "did you mean data.train_batch_size?"),
        ("env.max_step=3", "did you mean env.max_steps?"),
        ("algorithm.step_advantage_w=2", "did you mean algorithm.gigpo.step_advantage_w?"),
        ("actor_rollout_ref.actor.lr=1e-5", "did you mean actor_rollout_ref.actor.optim.lr?"),
        ("trainer.total_epoch=2", "did you mean trainer.total_epochs?"),
        ("env.webshop={human_gols: true}", "did you mean env.webshop.human_goals?"),
        ("preset=embeded", "did you mean embedded?"),
        ("xyzzy=1", "see verl/trainer/config/ppo_trainer.yaml"),
        ("vllm", "write key=value"),
        ("preset=foo", "There is no preset 'foo'; there are: embedded, none."),
        ("~data.seed", "data.seed cannot be removed; set another value."),
        ("~trainer.logger", "trainer.logger cannot be removed; set another value."),
        ("~env.webshop", "env.webshop cannot be removed; set another value."),
        ("~data.gen_batch_size", "data.gen_batch_size cannot be removed; set another value, such as null."),
        ("actor.optim.lr=1", "did you mean actor_rollout_ref.actor.optim.lr?"),
        ("actor.lr=1", "did you mean actor_rollout_ref.actor.optim.lr?"),
        ("actor.optim.lt=1", "did you mean actor_rollout_ref.actor.optim.lr?"),
        ("ref.fsdp_config.param_offload=true", "did you mean actor_rollout_ref.ref.fsdp_config.param_offload?"),
        ("ref.param_offload=true", "did you mean actor_rollout_ref.ref.fsdp_config.param_offload?"),
        ("rollout.dtype=auto", "did you mean actor_rollout_ref.rollout.dtype?"),
        ("model.path=x", "did you mean actor_rollout_ref.model.path?"),
        ("lr=1", "did you mean actor_rollout_ref.actor.optim.lr or critic.optim.lr?"),
        ("optim.lr=1", "did you mean actor_rollout_ref.actor.optim.lr or critic.optim.lr?"),
        ("gigpo.mode=mean_norm", "did you mean algorithm.gigpo.mode?"),
        ("buffer_dtype=fp32", "did you mean actor_rollout_ref.actor.fsdp_config.mixed_precision.buffer_dtype, "),
        ("enable=true", "reward_model.enable or 1 more of that name?"),
        ("data.train_batch_size=abc", "data.train_batch_size expects a whole number, got 'abc'"),
        ("data.train_batch_size=1.5", "data.train_batch_size expects a whole number, got 1.5"),
        ("data.train_batch_size=true", "data.train_batch_size expects a whole number, got true"),
        ("data.train_batch_size=null", "data.train_batch_size expects a whole number, got null"),
        ("data.shuffle=1", "data.shuffle expects true or false, got 1"),
        ("actor_rollout_ref.actor.optim.lr=fast", "actor_rollout_ref.actor.optim.lr expects a number, got 'fast'"),
        ("actor_rollout_ref.actor.loss_agg_mode=token_mean", "did you mean token-mean?"),
        ("actor_rollout_ref.actor.kl_loss_type=full", "expects one of kl, k1, abs, mse, k2, low_var_kl, k3"),
        ("trainer.device=gpu", "expects one of auto, cuda, cpu"),
        ("env.webshop=3", "env.webshop is a group of settings"),
        ("data.train_files=${nowhere}", "data.train_files"),
        ("actor_rollout_ref.actor.optim.lr=nan", "actor_rollout_ref.actor.optim.lr expects a number, got nan"),
        ("trainer.profile_steps=3", "expects a list (a whole number each) or null, got 3, such as [3]"),
        ("env.sokoban.dim_room=6", "expects a list (a whole number each), got 6, such as [6]"),
        ("added_keys=3", "added_keys expects a list"),
        ("hydra.nope=3", "Hydra has no setting hydra.nope"),
        ("hydra.run.dri=/x", "did you mean hydra.run.dir?"),
        ("hydra.run=5", "hydra.run=5"),
        ("hydra/launcher=nothing", "hydra/launcher"),
        ("env.sokoban.dim_room=6", "a list (a whole number each)"),
        ("trainer.experiment_name=true", """expects text, got true; as a text it is quoted twice: '"true"'"""),
        ("trainer.project_name=null", """expects text, got null; as a text it is quoted twice: '"null"'"""),
        ("data.train_files=[~/a]", """'~' can stand there only in quotes that are part of the value; write 'data.train"""),
        ("data.train_files=[~/a]", "or write $HOME for ~"),
        ("env.rollout.m=4", "There is no setting env.rollout.m; env.rollout has n. (A key"),
        ("rollout.val_kwargs.x=4", "actor_rollout_ref.rollout.val_kwargs has "),
        ("env.zzz=4", "env has "),
        ("env.zzz.yyy=4", "env has "),
        ("trainer.experiment_name==x", "'=' can stand there only in quotes"),
        ("data.train_files=${data.train_files}", "data.train_files: Recursive interpolation detected"),
        ("data.max_prompt_length=x", "data.max_prompt_length expects a whole number"),  # and not those that follow it
    ],
)
def test_mistakes_are_answered_in_one_line_that_names_the_fix(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        default_config(override)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        default_config(*overrides)
    assert str(caught.value).splitlines()[1:] == [f"  {one}" for one in caught.value.problems]
    return list(caught.value.problems)


def test_all_wrong_types_choices_and_names_are_reported_together() -> None:
    found = problems("trainer.total_epochs=three", "actor_rollout_ref.actor.kl_loss_type=foo", "algorithm.kl_penalty=k9",
                     "trainer.save_frq=2", "~data.seed", "preset=foo", "data.val_files=${nowhere}", "trainer.nnodes",
                     "env.webshop={human_gols: true, sed: 3}", "hydra.nope=3", "data.max_prompt_length=long")  # fmt: skip
    expected = ["Cannot read 'trainer.nnodes'", "There is no preset 'foo'", "Hydra has no setting hydra.nope",
                "There is no setting trainer.save_frq", "data.seed cannot be removed",
                "There is no setting env.webshop.human_gols", "There is no setting env.webshop.sed",
                "data.val_files: Interpolation key 'nowhere' not found", "data.max_prompt_length expects",
                "actor_rollout_ref.actor.kl_loss_type expects one of", "algorithm.kl_penalty expects one of",
                "trainer.total_epochs expects a whole number, got 'three'"]  # fmt: skip
    assert len(found) == len(expected)
    assert all(any(one.startswith(start) for one in found) for start in expected), found


def test_all_problems_of_a_file_are_reported_together() -> None:
    tree = default_config().to_dict()
    tree["env"]["max_stepz"], tree["env"]["rollout"] = 4, {"n": "x", "m": 1}
    del tree["data"]["seed"]
    with pytest.raises(ConfigError) as caught:
        to_dataclass(tree)
    found = " ".join(caught.value.problems)
    assert len(caught.value.problems) == 4
    assert "env.max_stepz" in found and "env.rollout.n expects" in found and "env.rollout.m" in found
    assert "data.seed is missing" in found


@pytest.mark.parametrize("text", ["~/foo", "a=b.parquet", "/home/müller/run #1", "a&b;c!", "a: ~b"])
def test_plain_text_may_have_any_characters(text: str, tmp_path) -> None:
    config = default_config(f"data.train_files={text}", f"+trainer.run_dir={text}/${{trainer.experiment_name}}")
    assert (config.data.train_files, config.trainer.run_dir) == (text, f"{text}/gsm8k")
    assert compose([f"data.train_files={text}"]).typed_keys == {"data.train_files"}
    write_resolved(to_yaml(config), tmp_path)
    assert to_dataclass(compose_config([], tmp_path, "resolved_config")) == config


@pytest.mark.parametrize("name", ["1e5", "007", "1_000", "1.50", "12e4567", "nan", "+3", "0x10", "1:30"])
def test_a_number_given_for_a_text_stays_as_it_was_typed(name: str, tmp_path) -> None:
    config = default_config(f"trainer.experiment_name={name}", f"++trainer.project_name={name}", f"env.split_digest={name}",
                            "env.max_steps=1_0")  # fmt: skip
    assert (config.trainer.experiment_name, config.trainer.project_name, config.env.split_digest) == (name,) * 3
    assert config.trainer.run_dir == f"checkpoints/{name}/{name}"
    assert config.env.max_steps == 10
    write_resolved(to_yaml(config), tmp_path)
    assert to_dataclass(compose_config([], tmp_path, "resolved_config")) == config
    assert default_config(f"trainer.experiment_name={name}", "trainer.resume_from_path=null").trainer.resume_from_path is None


def test_names_listed_for_several_jobs_stay_as_they_were_typed() -> None:
    composed = compose(["trainer.experiment_name=1e5,2e5,x"], multirun=True)
    assert composed.config.trainer.experiment_name == "1e5"
    assert composed.overrides == ["trainer.experiment_name='1e5','2e5',x"]


def test_values_take_the_type_of_their_key() -> None:
    config = default_config("trainer.experiment_name=12", "actor_rollout_ref.actor.optim.lr=1", "data.seed=7.0",
                            "data.train_files=[a.parquet,b.parquet]", "trainer.logger=console")
    assert config.trainer.experiment_name == "12"
    assert isinstance(config.actor_rollout_ref.actor.optim.lr, float)
    assert config.data.seed == 7 and isinstance(config.data.seed, int)
    assert config.data.train_files == ["a.parquet", "b.parquet"]
    assert config.trainer.logger == "console"


def test_runs_of_the_embedded_preset_have_a_folder_for_each_estimator() -> None:
    run_dir = default_config("preset=embedded", "algorithm.adv_estimator=grpo").trainer.run_dir
    assert run_dir == "checkpoints/verl_agent_webshop/embedded_grpo"
    named = default_config("preset=embedded", "trainer.experiment_name=mine")
    assert named.trainer.run_dir == "checkpoints/verl_agent_webshop/mine"


def test_added_keys_are_kept_in_their_node() -> None:
    config = default_config("+algorithm.mine=3", "++env.webshop.deep.er=[1,2]",
                            "+actor_rollout_ref.rollout.repetition_penalty=1.1")
    assert config.algorithm.extra == {"mine": 3}
    assert config.env.webshop.extra == {"deep": {"er": [1, 2]}}
    assert config.actor_rollout_ref.rollout.extra == {"repetition_penalty": 1.1}
    assert config.to_dict()["env"]["webshop"]["deep"] == {"er": [1, 2]}


def test_plus_on_a_key_that_exists_sets_it() -> None:
    config = default_config("+data.seed=5", "+actor_rollout_ref.actor.fsdp_config.model_dtype=bf16")
    assert config.data.seed == 5
    assert config.actor_rollout_ref.actor.fsdp_config.model_dtype == "bf16"
    assert config.added_keys == []


def test_free_mappings_take_anything_with_a_plus() -> None:
    config = default_config("+actor_rollout_ref.model.override_config.attention_dropout=0.1",
                            "+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32")
    assert config.actor_rollout_ref.model.override_config == {"attention_dropout": 0.1}
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm == {"swap_space": None, "block_size": 32}


def test_later_overrides_win_and_beat_the_preset() -> None:
    config = default_config("env.rollout.n=3", "preset=embedded", "env.rollout.n=5")
    assert (config.preset, config.env.rollout.n, config.trainer.device) == ("embedded", 5, "cpu")


def test_unknown_keys_in_a_file_are_refused(tmp_path) -> None:
    tree = default_config().to_dict()
    tree["env"]["max_stepz"] = 4
    with pytest.raises(ConfigError, match="did you mean env.max_steps"):
        to_dataclass(tree)


@pytest.mark.parametrize("content", [b"a: [", b"\xff\xfe\x00", b"trainer:\n  a: 1\n b"])
def test_a_damaged_file_is_named(content: bytes, tmp_path) -> None:
    (tmp_path / "resolved_config.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match="resolved_config.yaml") as caught:
        compose_config([], tmp_path, "resolved_config")
    assert "\n" not in str(caught.value)


def test_keys_of_a_resolved_config_follow_others_where_they_did(tmp_path) -> None:
    config = default_config("trainer.experiment_name=one", "critic.ppo_epochs=7", "env.history_length=3")
    write_resolved(to_yaml(config), tmp_path)

    def again(*overrides: str) -> PPOTrainerConfig:
        return to_dataclass(compose_config(overrides, tmp_path, "resolved_config"))

    renamed = again("trainer.experiment_name=two")
    assert renamed.trainer.run_dir == renamed.trainer.default_local_dir == "checkpoints/verl_examples/two"
    trainer = dataclasses.replace(renamed.trainer, experiment_name="one", default_local_dir="checkpoints/verl_examples/one",
                                  run_dir="checkpoints/verl_examples/one")  # fmt: skip
    assert dataclasses.replace(renamed, trainer=trainer) == config
    assert again("data.max_prompt_length=77").actor_rollout_ref.rollout.prompt_length == 77
    assert again("env.history_length=1").algorithm.hgpo.history_length == 1
    assert again("actor_rollout_ref.actor.ppo_epochs=5").critic.ppo_epochs == 7  # had a value of its own
    other = again("trainer.experiment_name=two", "trainer.run_dir=elsewhere").trainer
    assert (other.default_local_dir, other.run_dir) == ("checkpoints/verl_examples/two", "elsewhere")


def test_a_file_of_ones_own_that_extends_the_defaults_keeps_its_values(tmp_path) -> None:
    text = "defaults: [ppo_trainer, _self_]\ntrainer: {run_dir: checkpoints/verl_examples/gsm8k}\n"
    (tmp_path / "mine.yaml").write_text(text)
    trainer = to_dataclass(compose_config(["trainer.experiment_name=two"], tmp_path, "mine")).trainer
    assert trainer.run_dir == "checkpoints/verl_examples/gsm8k" != trainer.default_local_dir


def test_a_missing_key_is_named() -> None:
    tree = default_config().to_dict()
    del tree["env"]["webshop"]["seed"]
    with pytest.raises(ConfigError, match="env.webshop.seed is missing"):
        to_dataclass(tree)


@pytest.mark.parametrize("overrides", [[], ["preset=embedded", "+algorithm.mine=3", "data.seed=9"]])
def test_the_resolved_config_of_a_run_gives_the_same_run(overrides: list[str], tmp_path) -> None:
    config = default_config(*overrides)
    write_resolved(to_yaml(config), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["resolved_config.yaml"]
    again = to_dataclass(compose_config([], config_dir=tmp_path, config_name="resolved_config"))
    assert again == config
    changed = to_dataclass(compose_config(["data.seed=11"], tmp_path, "resolved_config"))
    assert changed == dataclasses.replace(config, data=dataclasses.replace(config.data, seed=11))
    with pytest.raises(ConfigError, match="leave out preset"):
        compose_config(["preset=none"], tmp_path, "resolved_config")


def test_a_user_file_can_build_on_the_shipped_one(tmp_path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults:\n  - ppo_trainer\n  - _self_\ndata:\n  seed: 42\n", encoding="utf-8")
    config = to_dataclass(compose_config(["env.rollout.n=2"], tmp_path, "mine"))
    assert (config.data.seed, config.env.rollout.n) == (42, 2)
    with pytest.raises(ConfigError, match="no configuration file"):
        compose_config([], tmp_path, "yours")


def test_the_typed_config_is_frozen_and_travels() -> None:
    config = default_config("+algorithm.mine=3")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.data.seed = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config


def test_one_node_from_plain_values() -> None:
    values = default_config().env.webshop.to_dict()
    assert node_from_dict(WebshopConfig, {**values, "seed": 3}, "env.webshop").seed == 3
    with pytest.raises(ConfigError, match="env.webshop.seed expects a whole number"):
        node_from_dict(WebshopConfig, {**values, "seed": "x"}, "env.webshop")


def test_the_first_job_of_a_multirun_is_checked_and_all_are_handed_on() -> None:
    listed = ["data.seed=3,4", "env.max_steps=range(5,7)", "+algorithm.mine=a,b", "preset=embedded,none"]
    composed = compose(listed, multirun=True)
    assert (composed.config.data.seed, composed.config.env.max_steps, composed.config.algorithm.mine) == (3, 5, "a")
    assert composed.config.preset == "embedded"
    assert {"data.seed=3,4", "env.max_steps=range(5,7)", "preset=embedded,none"} <= set(composed.overrides)
    with pytest.raises(ConfigError, match="add --multirun"):
        compose(["data.seed=3,4"])
