"""Every recipe: its full list of overrides composes, is valid with two GPUs and without one, and says what it should.

The scripts run with a python3 that writes down what it is called with, so nothing starts; the recorded command is
composed and validated here. The stock GiGPO recipe is looked at in test_recipe.py.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.data_preprocess import prepare
from verl.trainer.config import PPOTrainerConfig, default_config, machine, validate

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(str(path.relative_to(ROOT / "examples")) for path in ROOT.glob("examples/*_trainer/run_*.sh"))
FAMILIES = ("dapo", "gigpo", "gigpo_dynamic", "grpo", "gspo", "ppo", "reinforce_plus_plus", "rloo")
QWEN_1_5B, QWEN_7B, QWEN_3 = "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen3-1.7B"
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"

NO_GROUPS = {"env.rollout.n": 1, "data.train_batch_size": (128, 64)}
GROUPS = {"env.rollout.n": 8, "data.train_batch_size": (16, 8)}
KL_IN_LOSS = {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.01, "algorithm.use_kl_in_reward": False}
NO_KL = {f"{ACTOR}.use_kl_loss": False, "algorithm.use_kl_in_reward": False}
STOCK_CLIP = {f"{ACTOR}.clip_ratio_low": 0.2, f"{ACTOR}.clip_ratio_high": 0.2, f"{ACTOR}.policy_loss.loss_mode": "vanilla"}
CLIP_HIGHER = {**STOCK_CLIP, f"{ACTOR}.clip_ratio_high": 0.28}
FILTER = {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 10}
NO_FILTER = {"algorithm.filter_groups.enable": False}
LORA = {f"{MODEL}.lora_rank": (64, 16), f"{MODEL}.lora_alpha": (64, 32), f"{ACTOR}.optim.lr": (3e-6, 1e-3)}
THINKING = {"data.apply_chat_template_kwargs": {"enable_thinking": True}}

GIGPO = {
    "algorithm.adv_estimator": "gigpo", "algorithm.gamma": 0.95, "algorithm.gigpo.step_advantage_w": 1.0,
    **GROUPS, **STOCK_CLIP, **KL_IN_LOSS, **NO_FILTER, f"{MODEL}.path": QWEN_1_5B, f"{MODEL}.lora_rank": 0,
}
GRPO = {**GIGPO, "algorithm.adv_estimator": "grpo", "algorithm.gamma": 1.0}
PPO = {
    **GRPO, **NO_GROUPS, "algorithm.adv_estimator": "gae", "algorithm.lam": 1.0, "critic.model.path": QWEN_1_5B,
    "critic.cliprange_value": 0.5,
}

# Key -> value, or (value with GPUs, value without one).
EXPECTED: dict[str, dict[str, Any]] = {
    "gigpo_trainer/run_webshop.sh": GIGPO,
    "gigpo_trainer/run_webshop_lora.sh": {**GIGPO, **NO_KL, **LORA, f"{MODEL}.path": QWEN_7B},
    "gigpo_trainer/run_webshop_qwen3.sh": {**GIGPO, **NO_KL, **THINKING, f"{MODEL}.path": QWEN_3},
    "gigpo_dynamic_trainer/run_webshop.sh": {**GIGPO, **FILTER, **CLIP_HIGHER},
    "grpo_trainer/run_webshop.sh": GRPO,
    "grpo_trainer/run_webshop_lora.sh": {**GRPO, **NO_KL, **LORA, f"{MODEL}.path": QWEN_7B},
    "grpo_trainer/run_webshop_qwen3.sh": {**GRPO, **NO_KL, **THINKING, f"{MODEL}.path": QWEN_3},
    "dapo_trainer/run_webshop.sh": {
        **GRPO, **NO_KL, **FILTER, **CLIP_HIGHER, f"{ACTOR}.loss_agg_mode": "token-mean", f"{ACTOR}.entropy_coeff": 0,
        "reward_model.overlong_buffer.enable": True, "reward_model.overlong_buffer.len": (128, 16),
        "reward_model.overlong_buffer.penalty_factor": 1.0,
    },
    "gspo_trainer/run_webshop.sh": {
        **GRPO, f"{ACTOR}.policy_loss.loss_mode": "gspo", f"{ACTOR}.clip_ratio_low": 3e-4,
        f"{ACTOR}.clip_ratio_high": 4e-4, f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
    },
    "rloo_trainer/run_webshop.sh": {**GRPO, "algorithm.adv_estimator": "rloo"},
    "reinforce_plus_plus_trainer/run_webshop.sh": {
        **GRPO, **NO_GROUPS, **NO_KL, "algorithm.adv_estimator": "reinforce_plus_plus",
        "algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "kl", "algorithm.kl_ctrl.kl_coef": 0.01,
    },
    "reinforce_plus_plus_trainer/run_webshop_baseline.sh": {
        **GRPO, "algorithm.adv_estimator": "reinforce_plus_plus_baseline", f"{ACTOR}.kl_loss_type": "mse",
    },
    "ppo_trainer/run_webshop.sh": {**PPO, "critic.optim.lr": (1e-5, 1e-3)},
    "ppo_trainer/run_webshop_lora.sh": {
        **PPO, **NO_KL, **LORA, f"{MODEL}.path": QWEN_7B, "critic.model.path": QWEN_7B,
        "critic.optim.lr": (3e-5, 1e-3), "critic.model.lora_rank": (64, 16), "critic.model.lora_alpha": (64, 32),
    },
}


@dataclass(frozen=True)
class Command:
    """What a script starts: the arguments of the data shell and those of the training."""

    prepare: list[str]
    overrides: list[str]


def command(
    tmp_path: Path, script: str, *arguments: str, gpus: int = 0, writes: bool = True, **environment: str
) -> Command:
    """The commands of a script on a machine that seems to have ``gpus`` GPUs; nothing starts.

    Args:
        writes: whether the script is to write the parquet files; without, ``prepare`` is empty.
    """
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    listing = "\n".join(f"echo 'GPU {index}: Some GPU (UUID: x)'" for index in range(gpus))
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\n{listing or 'exit 9'}\n", encoding="utf-8")
    (tools / "python3").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$RECORD/$2"\n', encoding="utf-8")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    inherited = {name: text for name, text in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "ENGINE")}
    subprocess.run(
        ["bash", str(ROOT / "examples" / script), *arguments], cwd=tmp_path, stdin=subprocess.DEVNULL, timeout=300,
        check=True, capture_output=True,
        env={**inherited, "PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(tmp_path), "RECORD": str(tmp_path),
             "VIRTUAL_ENV": "any", **environment},
    )
    files = [tmp_path / name for name in ("examples.data_preprocess.prepare", "verl.trainer.main_ppo")]
    assert [file.exists() for file in files] == [writes, True]
    recorded = [file.read_text(encoding="utf-8").splitlines() if file.exists() else [] for file in files]
    return Command(*(lines[2:] for lines in recorded))


def value(config: PPOTrainerConfig, key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    return found


@pytest.fixture
def two_gpus(monkeypatch) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda: 2)


def test_every_family_has_a_recipe_and_every_recipe_an_expectation() -> None:
    assert sorted(EXPECTED) == SCRIPTS
    assert {f"{family}_trainer/run_webshop.sh" for family in FAMILIES} <= set(SCRIPTS)


@pytest.mark.parametrize("gpus", [2, 0])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_recipe_is_valid_and_sets_what_its_papers_say(tmp_path: Path, two_gpus, script: str, gpus: int) -> None:
    started = command(tmp_path, script, gpus=gpus)
    assert prepare.main(started.prepare) == 0
    config = default_config(*started.overrides)
    validate(config)
    for key, wanted in EXPECTED[script].items():
        wanted = wanted[gpus == 0] if isinstance(wanted, tuple) else wanted
        if key.endswith("model.path") and not gpus:
            wanted = "pkg://agent_system.environments.env_package.webshop/embedded_model"
        assert value(config, key) == pytest.approx(wanted), key
    assert config.trainer.device == ("cuda" if gpus else "cpu")
    assert (config.env.env_name, config.env.max_steps, config.trainer.n_gpus_per_node) == ("Webshop", 15, 2)
    tasks = config.data.train_batch_size
    assert tasks * config.env.rollout.n == (128 if gpus else 64)
    assert started.prepare[-4:] == ["--train_data_size", str(tasks), "--val_data_size", "256" if gpus else "128"]


def test_recipes_write_to_folders_of_their_own(tmp_path: Path) -> None:
    started = [command(tmp_path, script, gpus=gpus).overrides for script in SCRIPTS for gpus in (2, 0)]
    names = [[one for one in overrides if one.startswith("trainer.experiment_name=")][-1] for overrides in started]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_arguments_of_the_command_line_come_last(tmp_path: Path, script: str) -> None:
    given = ["data.train_batch_size=4", "algorithm.adv_estimator=hgpo", "trainer.project_name=a b"]
    started = command(tmp_path, script, "hf", *given)
    assert started.overrides[-3:] == given
    assert "actor_rollout_ref.rollout.name=hf" in started.overrides
    assert started.prepare[-4:] == ["--train_data_size", "4", "--val_data_size", "128"]
    assert "actor_rollout_ref.rollout.name=vllm" in command(tmp_path, script, *given).overrides


@pytest.mark.parametrize("given", [
    "data.train_batch_size=4", "+data.train_batch_size=4", "++data.train_batch_size=4", "data.train_batch_size=4.0",
    'data.train_batch_size="4"', "data={train_batch_size: 4}", "+data={seed: 3,train_batch_size:4,val_batch_size: 2}",
])
def test_the_number_of_tasks_is_read_from_every_form_of_its_override(tmp_path: Path, given: str) -> None:
    started = command(tmp_path, "gigpo_trainer/run_webshop.sh", "data.train_batch_size=6", given)
    assert started.prepare[-4:-2] == ["--train_data_size", "4"]
    assert any(f"data.train_files='{tmp_path}/data/verl-agent/tasks_4_128/" in one for one in started.overrides)


@pytest.mark.parametrize(("given", "writes"), [
    (["explain=true"], False), (["+explain=True"], False), (["explain=true", "++explain=false"], True),
    (["--cfg", "job"], False), (["--cfg=job"], False), ([], True),
])
def test_a_script_that_only_informs_writes_no_files(tmp_path: Path, given: list[str], writes: bool) -> None:
    overrides = command(tmp_path, "gigpo_trainer/run_webshop.sh", *given, writes=writes).overrides
    assert overrides[len(overrides) - len(given):] == given
