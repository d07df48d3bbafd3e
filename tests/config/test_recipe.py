"""The WebShop script: its overrides compose and fit, arguments are passed on, with and without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.data_preprocess import prepare

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "examples/gigpo_trainer/run_webshop.sh"

# The recipe as users know it: key, value on two GPUs.
STOCK = {
    "algorithm.adv_estimator": "gigpo", "algorithm.gamma": "0.95", "algorithm.gigpo.step_advantage_w": "1",
    "algorithm.gigpo.mode": "mean_norm", "algorithm.use_kl_in_reward": "false", "data.train_batch_size": "16",
    "data.val_batch_size": "128", "data.max_prompt_length": "4096", "data.max_response_length": "512",
    "data.filter_overlong_prompts": "true", "data.truncation": "error", "data.return_raw_chat": "true",
    "actor_rollout_ref.model.path": "Qwen/Qwen2.5-1.5B-Instruct", "actor_rollout_ref.model.use_remove_padding": "true",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "true", "actor_rollout_ref.actor.optim.lr": "1e-06",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "64", "actor_rollout_ref.actor.use_dynamic_bsz": "true",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "16384",
    "actor_rollout_ref.actor.use_kl_loss": "true", "actor_rollout_ref.actor.kl_loss_coef": "0.01",
    "actor_rollout_ref.actor.kl_loss_type": "low_var_kl", "actor_rollout_ref.actor.fsdp_config.param_offload": "false",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "false",
    "actor_rollout_ref.actor.use_invalid_action_penalty": "true",
    "actor_rollout_ref.actor.invalid_action_penalty_coef": "0.1", "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": "true",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "2",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "0.6",
    "actor_rollout_ref.rollout.enable_chunked_prefill": "false", "actor_rollout_ref.rollout.enforce_eager": "false",
    "actor_rollout_ref.rollout.free_cache_engine": "false", "actor_rollout_ref.rollout.val_kwargs.temperature": "0.4",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "true",
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": "true",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "true", "env.env_name": "Webshop", "env.seed": "0",
    "env.max_steps": "15", "env.rollout.n": "8", "env.resources_per_worker.num_cpus": "0.1",
    "trainer.critic_warmup": "0", "trainer.logger": "['console', 'wandb']",
    "trainer.project_name": "verl_agent_webshop", "trainer.experiment_name": "gigpo_qwen2.5_1.5b",
    "trainer.n_gpus_per_node": "2", "trainer.nnodes": "1", "trainer.save_freq": "-1", "trainer.test_freq": "5",
    "trainer.total_epochs": "150", "trainer.val_before_train": "true",
    "actor_rollout_ref.actor.entropy_coeff": "0.001", "actor_rollout_ref.actor.clip_ratio_c": "3",
    "env.history_length": "2", "env.webshop.use_small": "true", "env.webshop.human_goals": "false",
}


def run_script(
    tmp_path: Path, *arguments: str, gpus: int = 0, explain: bool = True, **environment: str
) -> subprocess.CompletedProcess:
    """The script with ``explain=true``, unless told otherwise, on a machine that seems to have ``gpus`` GPUs."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    listing = "\n".join(f"echo 'GPU {index}: Some GPU (UUID: x)'" for index in range(gpus))
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\n{listing or 'exit 9'}\n", encoding="utf-8")
    (tools / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', encoding="utf-8")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}", encoding="utf-8")
    chosen = [] if gpus else [f"actor_rollout_ref.model.path={model}"]
    inherited = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "ENGINE")}
    return subprocess.run(
        ["bash", str(ROOT / SCRIPT), *arguments, *chosen, *(["explain=true"] if explain else [])],
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path, stdin=subprocess.DEVNULL,
        env={**inherited, "PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT),
             "VIRTUAL_ENV": sys.prefix, **environment},
    )


def write_shell(home: Path, tasks: int, val_tasks: int) -> Path:
    """The parquet files as the script writes them before it trains; returns their folder."""
    folder = home / "data" / "verl-agent" / f"tasks_{tasks}_{val_tasks}"
    sizes = ["--train_data_size", str(tasks), "--val_data_size", str(val_tasks)]
    assert prepare.main(["--mode", "text", "--local_dir", str(folder), *sizes]) == 0
    return folder / "text"


def explained(done: subprocess.CompletedProcess) -> dict[str, str]:
    """Values by key out of the explanation."""
    table = done.stdout.split("What follows from it:")[0].splitlines()
    found = {}
    for line in table:
        key, _, rest = line.partition(" ")
        source = next((one for one in ("command line", "preset embedded", "ppo_trainer.yaml") if one in rest), None)
        if source:
            found[key] = rest[: rest.rindex(source)].strip()
    return found


def test_two_gpus_run_the_recipe_that_users_know(tmp_path: Path) -> None:
    values = explained(run_script(tmp_path, gpus=2))
    assert {key: values[key] for key in STOCK} == STOCK
    assert values["data.train_files"] == f"{tmp_path}/data/verl-agent/tasks_16_256/text/train.parquet"
    assert not (tmp_path / "data").exists()  # to explain is to write nothing


def test_the_recipe_fits_two_gpus(tmp_path: Path) -> None:
    write_shell(tmp_path, 16, 256)
    done = run_script(tmp_path, "trainer.device=cpu", gpus=2)  # the check for real GPUs is the only one that would fail
    assert done.returncode == 0, done.stderr
    assert "training steps                               150" in done.stdout
    assert "validation tasks                             256, 128 at a time" in done.stdout


def test_one_gpu_is_enough(tmp_path: Path) -> None:
    done = run_script(tmp_path, "trainer.device=cpu", gpus=1)
    assert done.returncode == 0, done.stderr
    values = explained(done)
    assert values["trainer.n_gpus_per_node"] == values["actor_rollout_ref.rollout.tensor_model_parallel_size"] == "1"


@pytest.mark.parametrize(("visible", "ranks"), [("3", "1"), ("0,1,5", "2"), ("1,", "1"), ("", None), ("-1", None)])
def test_only_visible_gpus_count(tmp_path: Path, visible: str, ranks: str | None) -> None:
    done = run_script(tmp_path, "trainer.device=cpu", gpus=8, CUDA_VISIBLE_DEVICES=visible)
    assert done.returncode == 0, done.stderr
    assert ("no GPU found" in done.stdout) == (ranks is None)
    if ranks is not None:
        assert explained(done)["trainer.n_gpus_per_node"] == ranks


def test_without_a_gpu_the_embedded_preset_runs_and_says_so(tmp_path: Path) -> None:
    done = run_script(tmp_path)
    assert done.stdout.splitlines()[0] == (
        "run_webshop.sh: no GPU found, running the embedded model on the CPU (preset=embedded)."
    )
    assert done.returncode == 0, done.stderr
    values = explained(done)
    assert values["trainer.device"] == "cpu"
    for key in ("algorithm.adv_estimator", "algorithm.gamma", "algorithm.gigpo.mode", "env.env_name", "env.max_steps"):
        assert values[key] == STOCK[key]


@pytest.mark.parametrize(("arguments", "environment"), [((), {"ENGINE": "hf"}), (("hf",), {})])
def test_the_engine_is_chosen_by_variable_or_first_argument(tmp_path: Path, arguments, environment) -> None:
    done = run_script(tmp_path, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    assert explained(done)["actor_rollout_ref.rollout.name"] == "hf"


def test_all_arguments_are_passed_on(tmp_path: Path) -> None:
    write_shell(tmp_path, 2, 128)
    done = run_script(tmp_path, "trainer.total_epochs=2", "env.rollout.n=4", "data.train_batch_size=2")
    assert done.returncode == 0, done.stderr
    values = explained(done)
    assert (values["trainer.total_epochs"], values["env.rollout.n"], values["data.train_batch_size"]) == ("2", "4", "2")
    assert "training steps                               2" in done.stdout
    refused = run_script(tmp_path, "trainer.total_epoch=2")
    assert refused.returncode == 2 and "did you mean trainer.total_epochs?" in refused.stderr


@pytest.mark.parametrize("wrong", ["trainer.total_epoch=2", "env.rollout.n=0"])
def test_what_is_refused_is_refused_before_anything_is_written(tmp_path: Path, wrong: str) -> None:
    done = run_script(tmp_path, wrong, explain=False)
    assert done.returncode == 2 and done.stderr.startswith("Configuration error: ") and wrong[:-2] in done.stderr
    assert not (tmp_path / "data").exists()


def test_a_home_folder_with_a_space_and_a_size_that_is_too_large(tmp_path: Path) -> None:
    home = tmp_path / "my home"
    home.mkdir()
    done = run_script(tmp_path, HOME=str(home))
    assert done.returncode == 0, done.stderr
    assert explained(done)["data.train_files"] == f"{home}/data/verl-agent/tasks_8_128/text/train.parquet"
    assert "training steps                               unknown until data.train_files is written" in done.stdout
    write_shell(tmp_path, 8, 128)
    refused = run_script(tmp_path, "data.train_batch_size=99999999999")
    assert refused.returncode == 2 and "less than one batch" in refused.stderr
