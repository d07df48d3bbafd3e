"""``explain=true``, the entry point's exit codes and messages, and the estimates."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from verl.trainer.config.compose import compose
from verl.trainer.config.convert import to_dataclass
from verl.trainer.config.derived import derived_lines
from verl.trainer.config.explain import explain, sources
from verl.trainer.config.memory import memory_phases, shape_from_json

ROOT = Path(__file__).resolve().parents[2]
QWEN_1_5B = dict(
    hidden_size=1536, num_hidden_layers=28, vocab_size=151936, num_attention_heads=12, num_key_value_heads=2,
    intermediate_size=8960, tie_word_embeddings=True, model_type="qwen2",
)
ENTRY = """
from verl.trainer.config import hydra_main, prepare_config

@hydra_main
def main(config):
    print("RAN", prepare_config(config).data.seed)

main()
"""


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess:
    script = tmp_path / "entry.py"
    script.write_text(ENTRY, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    return subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=120,
                          cwd=work, env=environment, check=False)


def children_cpu_seconds() -> float:
    """Of the processes that were started and have ended: other load on the machine is not in it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture
def runnable(tmp_path: Path) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    pq.write_table(pa.table({"prompt": list(range(8))}), tmp_path / "rows.parquet")
    return ["preset=embedded", f"actor_rollout_ref.model.path={tmp_path}/model",
            f"data.train_files={tmp_path}/rows.parquet", f"data.val_files={tmp_path}/rows.parquet"]


def test_every_value_has_its_source() -> None:
    composition = compose(["preset=embedded", "env.rollout.n=3", "+algorithm.mine=1", "data.max_prompt_length=99"])
    found = {name: (value, source) for name, value, source in sources(composition)}
    assert found["env.rollout.n"] == ("3", "command line")
    assert found["algorithm.mine"] == ("1", "command line")
    assert found["trainer.device"] == ("cpu", "preset embedded")
    assert found["algorithm.lam"] == ("1", "ppo_trainer.yaml")
    assert found["actor_rollout_ref.rollout.prompt_length"] == ("99", "ppo_trainer.yaml, ${data.max_prompt_length}")
    assert found["env.alfworld.eval_dataset"][1] == "ppo_trainer.yaml"


def test_derived_numbers_of_the_stock_recipe() -> None:
    config = to_dataclass(compose([
        "data.train_batch_size=16", "env.rollout.n=8", "env.max_steps=15", "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64", "trainer.total_training_steps=150", "trainer.test_freq=5",
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct",
    ]).config)
    lines = dict(derived_lines(config))
    assert lines["trajectories per training step"] == "128 = 16 tasks x 8 episodes"
    assert lines["rows (LLM calls) per training step"].startswith("128 to 1920 ")
    assert lines["rows per rank"] == "64 to 960"
    assert lines["optimiser steps per training step"].startswith("2 to 30 ")
    assert lines["training steps"] == "150"
    assert lines["validations"] == "31"
    assert lines["rollout engines"] == "1 x vllm with tensor parallel 2"
    assert lines["memory per rank"].startswith("unknown")


def test_parameters_of_a_known_model() -> None:
    shape = shape_from_json(QWEN_1_5B)
    assert shape.parameters == 1_543_714_304  # what transformers counts for this configuration
    assert shape.kv_width == 256


def memory(*overrides: str) -> dict[str, float]:
    """GiB a rank by phase, of a run on two GPUs in which every model is the 1.5 B one."""
    config = to_dataclass(compose([
        "trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "critic.ppo_micro_batch_size_per_gpu=4", *overrides,
    ]).config)
    policy = shape_from_json(QWEN_1_5B)
    shapes = {"model": policy, "critic": policy.with_value_head(), "reward model": policy.with_value_head()}
    held = {"model": True, "critic": config.uses_critic, "reward model": config.reward_model.enable}
    return {phase: gib for phase, gib, _ in memory_phases(config, {n: s for n, s in shapes.items() if held[n]})}


def test_memory_counts_weights_gradients_and_adam_once() -> None:
    phases = memory("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=true")
    parameters = 1_543_714_304 / 2**30
    rollout = parameters * (4 + 8) / 2 + parameters * 2 / 2 + parameters * 2 / 2  # trainer, reference, engine with TP 2
    assert phases["roll out"] == pytest.approx(rollout)
    assert phases["update"] > parameters * (4 + 4 + 8 + 2) / 2
    assert set(phases) == {"roll out", "update"}


VALUE_1_5B = 1_543_715_841 / 2**30  # what transformers counts for one number per position, in units of 2^30


def test_memory_has_the_critic_wherever_there_is_one() -> None:
    ppo, grpo = memory(), memory("algorithm.adv_estimator=grpo")
    for phase in grpo:  # weights and two moments in float32 over two ranks
        assert ppo[phase] - grpo[phase] == pytest.approx(VALUE_1_5B * 12 / 2)
    assert memory("algorithm.adv_estimator=grpo", "critic.enable=true") == ppo
    gradients = ppo["update of the critic"] - ppo["roll out"] + 1_543_714_304 / 2**30 * 2 / 2  # without the engine
    assert VALUE_1_5B * 4 / 2 < gradients < VALUE_1_5B * 4 / 2 + 2  # and activations

    fsdp = "critic.model.fsdp_config"
    away = memory(f"{fsdp}.param_offload=true", f"{fsdp}.optimizer_offload=true")
    assert {phase: away[phase] for phase in grpo} == pytest.approx(grpo)
    assert away["update of the critic"] == ppo["update of the critic"]
    on_host = memory(f"{fsdp}.offload_policy=true")
    assert {phase: on_host[phase] for phase in grpo} == pytest.approx(grpo)
    halves = memory(f"{fsdp}.param_offload=true")
    assert ppo["update"] - halves["update"] == pytest.approx(VALUE_1_5B * 4 / 2)
    on_cpu = ["trainer.device=cpu", f"{fsdp}.optimizer_offload=true"]  # host memory is where it is anyway
    assert memory(*on_cpu)["update"] == memory("trainer.device=cpu")["update"]
    lone = memory(f"{fsdp}.fsdp_size=1")
    assert lone["update"] - grpo["update"] == pytest.approx(VALUE_1_5B * 12)


def test_memory_says_that_its_activations_are_those_of_recomputed_layers() -> None:
    config = to_dataclass(compose([
        "actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.model.enable_gradient_checkpointing=true",
        "critic.model.enable_gradient_checkpointing=false",
    ]).config)  # fmt: skip
    policy = shape_from_json(QWEN_1_5B)
    phases = memory_phases(config, {"model": policy, "critic": policy.with_value_head()})
    _, update, critic = (parts for _, _, parts in phases)
    assert update.endswith(" for 16384 tokens with all layers recomputed")
    assert critic.endswith(" for 32768 tokens")


@pytest.mark.parametrize(("overrides", "said"), [
    (["trainer.device=cuda"], "; the engine fills 0.6 of the GPU with both"),
    (["trainer.device=cuda", "actor_rollout_ref.rollout.kv_cache_memory_mb=2048"], ", 2.00 GiB of it"),
    (["trainer.device=cuda", "actor_rollout_ref.rollout.name=hf"], ""),
    (["trainer.device=cpu"], ""),
])
def test_memory_says_what_an_engine_takes_of_a_gpu(overrides: list[str], said: str) -> None:
    config = to_dataclass(compose(["actor_rollout_ref.rollout.gpu_memory_utilization=0.6", *overrides]).config)
    policy = shape_from_json(QWEN_1_5B)
    _, _, parts = next(iter(memory_phases(config, {"model": policy, "critic": policy.with_value_head()})))
    assert parts.partition(" KiB a token")[2] == said


@pytest.mark.parametrize(("overrides", "said"), [
    (["use_dynamic_bsz=true", "ppo_max_token_len_per_gpu=9000"], "filled with rows up to 9000 tokens"),
    (["ppo_micro_batch_size_per_gpu=4"], "4 rows"),
    (["ppo_micro_batch_size=4"], "4 rows over all ranks"),
    ([], "not set"),
])
def test_micro_batches_of_policy_and_critic(overrides: list[str], said: str) -> None:
    def lines(estimator: str, *more: str) -> dict[str, str]:
        return dict(derived_lines(to_dataclass(compose([f"algorithm.adv_estimator={estimator}", *more]).config)))

    of_policy = lines("grpo", *(f"actor_rollout_ref.actor.{one}" for one in overrides))
    assert of_policy["micro-batches of the update"] == said and "micro-batches of the critic" not in of_policy
    assert lines("gae", *(f"critic.{one}" for one in overrides))["micro-batches of the critic"] == said


def test_memory_of_experts_is_not_guessed(tmp_path: Path) -> None:
    experts = QWEN_1_5B | {"num_experts_per_tok": 2, "num_local_experts": 8}
    with pytest.raises(KeyError, match="num_experts_per_tok"):
        shape_from_json(experts)
    (tmp_path / "config.json").write_text(json.dumps(experts))
    lines = dict(derived_lines(to_dataclass(compose([f"actor_rollout_ref.model.path={tmp_path}"]).config)))
    assert lines["memory per rank"] == (
        "unknown: the config.json of actor_rollout_ref.model.path is not on this machine, or not of a dense model like "
        "Llama and Qwen"
    )


def test_memory_of_adapters() -> None:
    adapters, head = 18_464_768 / 2**30, 1537 / 2**30  # what peft makes of rank 16 on all linear layers
    grpo, ppo = "algorithm.adv_estimator=grpo", memory("critic.model.lora_rank=16")
    assert ppo["update"] - memory(grpo)["update"] == pytest.approx((VALUE_1_5B * 4 + adapters * 12 + head * 8) / 2)
    actor = memory(grpo, "actor_rollout_ref.model.lora_rank=16")
    frozen = 1_543_714_304 / 2**30
    assert memory(grpo)["update"] - actor["update"] == pytest.approx((frozen * 12 - adapters * 16) / 2)

    shape = shape_from_json(QWEN_1_5B)
    assert shape.adapter_parameters(8, ["q_proj"]) == 28 * 8 * (1536 + 1536)
    assert shape.adapter_parameters(8, ".*mlp.*") == 28 * 8 * 3 * (1536 + 8960)


def test_memory_has_the_reward_model_unless_it_is_offloaded() -> None:
    without = memory()
    judged = memory("reward_model.enable=true")
    assert judged == pytest.approx({phase: gib + VALUE_1_5B * 2 / 2 for phase, gib in without.items()})
    assert memory("reward_model.enable=true", "reward_model.model.fsdp_config.param_offload=true") == without


def test_each_model_is_read_from_its_own_folder(tmp_path: Path) -> None:
    for name, layers in (("policy", 2), ("critic", 1)):
        (tmp_path / name).mkdir()
        text = json.dumps({**QWEN_1_5B, "num_hidden_layers": layers, "vocab_size": 1000})
        (tmp_path / name / "config.json").write_text(text, encoding="utf-8")
    overrides = [f"actor_rollout_ref.model.path={tmp_path}/policy", f"critic.model.path={tmp_path}/critic",
                 "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"]
    lines = dict(derived_lines(to_dataclass(compose(overrides).config)))
    block = 1536 * 1536 * 2 + 1536 * 256 * 2 + 1536 + 512 + 3 * 1536 * 8960 + 2 * 1536
    assert lines["model parameters"] == f"{(1000 * 1536 + 2 * block + 1536) / 1e6:.1f} M"
    assert lines["critic parameters"] == f"{(1000 * 1536 + block + 1536 + 1537) / 1e6:.1f} M"
    assert "critic" in lines["memory per rank, roll out"] and "memory per rank, update of the critic" in lines
    judged = [*overrides, "critic.enable=false", "algorithm.adv_estimator=grpo", "reward_model.enable=true",
              "reward_model.model.path=some/judge"]
    lines = dict(derived_lines(to_dataclass(compose(judged).config)))
    assert "critic parameters" not in lines and "memory per rank, update of the critic" not in lines
    assert lines["reward model parameters"] == (
        "unknown and not counted: the config.json of reward_model.model.path is not on this machine, or not of a dense "
        "model like Llama and Qwen"
    )


def test_explain_text_holds_values_numbers_and_remarks() -> None:
    text = explain(compose(["preset=embedded", "data.return_raw_chat=true"]))
    assert "What follows from it:" in text and "To note:" in text
    assert "data.return_raw_chat (the chat is always kept)" in text


@pytest.mark.parametrize("size", [
    "trainer.n_gpus_per_node", "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
])
def test_nothing_follows_from_a_size_of_zero(size: str) -> None:
    assert list(derived_lines(to_dataclass(compose(["preset=embedded", f"{size}=0"]).config))) == []


def test_columns_are_apart_even_after_a_long_value() -> None:
    text = explain(compose(["preset=embedded", f"trainer.run_dir=/{'long/' * 20}"]))
    (line,) = [line for line in text.splitlines() if line.startswith("trainer.run_dir ")]
    assert [part.strip() for part in line.split("  ") if part] == ["trainer.run_dir", f"/{'long/' * 20}", "command line"]


def test_columns_begin_at_the_same_place_whatever_the_longest_key_is() -> None:
    rows = explain(compose([f"+env.webshop.{'long_' * 20}=1"])).split("\n\n")[0].splitlines()
    values = {len(row) - len(row[row.index(" "):].lstrip()) for row in rows}
    assert values == {len("env.webshop.") + 100 + 2}


def test_explain_names_a_missing_file_with_code_of_the_users_own(tmp_path: Path, runnable: list[str]) -> None:
    done = run(tmp_path, *runnable, "explain=true", "actor_rollout_ref.model.external_lib=missing.py")
    assert done.returncode == 2 and "actor_rollout_ref.model.external_lib=missing.py: there is no file" in done.stderr
    assert list((tmp_path / "work").iterdir()) == []


def test_explain_prints_and_writes_nothing(tmp_path: Path, runnable: list[str]) -> None:
    done = run(tmp_path, *runnable, "explain=true")
    assert done.returncode == 0, done.stderr
    assert "RAN" not in done.stdout and "trajectories per training step" in done.stdout
    assert list((tmp_path / "work").iterdir()) == []


def test_each_job_of_a_multirun_is_checked_and_explained_or_run(tmp_path: Path, runnable: list[str]) -> None:
    jobs = ["--multirun", *runnable, "data.seed=1,2", "trainer.experiment_name=seed_${data.seed}"]
    shown = run(tmp_path, *jobs, "explain=true")
    assert shown.returncode == 0, shown.stderr
    assert "RAN" not in shown.stdout and shown.stdout.count("What follows from it:") == 2
    done = run(tmp_path, *jobs)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("RAN")] == ["RAN 1", "RAN 2"]
    kept = sorted((tmp_path / "work" / "checkpoints").glob("*/*/resolved_config.yaml"))
    assert [file.parent.name for file in kept] == ["seed_1", "seed_2"]


def test_mistakes_end_with_code_2_one_line_and_nothing_written(tmp_path: Path) -> None:
    begun = children_cpu_seconds()
    done = run(tmp_path, "data.trian_batch_size=3")
    assert children_cpu_seconds() - begun < 10  # about 1
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "Configuration error: There is no setting data.trian_batch_size; did you mean data.train_batch_size? "
        "(A key of your own is added with a plus: +data.trian_batch_size=...)"
    ]
    assert list((tmp_path / "work").iterdir()) == []
    both = run(tmp_path, "data.trian_batch_size=3", "trainer.total_epoch=3").stderr
    assert "2 settings do not work" in both and "data.train_batch_size?" in both and "trainer.total_epochs?" in both
    assert "ENGINE=... bash" in run(tmp_path, "ENGINE=hf").stderr
    assert run(tmp_path, "--nonsense").returncode == 2
    assert run(tmp_path, "--cfg", "job", "data.trian_batch_size=3").returncode == 2


def test_a_run_leaves_its_resolved_config_and_can_be_repeated_from_it(tmp_path: Path, runnable: list[str]) -> None:
    done = run(tmp_path, *runnable, "data.seed=77", "+algorithm.mine=2", "trainer.run_dir=here/run")
    assert done.returncode == 0, done.stderr
    assert "RAN 77" in done.stdout and "seed: 77" in done.stdout
    folder = tmp_path / "work" / "here" / "run"
    first = (folder / "resolved_config.yaml").read_text(encoding="utf-8")
    again = run(tmp_path, "--config-path", "here/run", "--config-name", "resolved_config")
    assert again.returncode == 0, again.stderr
    assert "RAN 77" in again.stdout
    assert (folder / "resolved_config.yaml").read_text(encoding="utf-8") == first
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["here"]


def test_hydra_prints_the_config(tmp_path: Path) -> None:
    done = run(tmp_path, "--cfg", "job", "--resolve", "preset=embedded", "+algorithm.mine=2")
    assert done.returncode == 0, done.stderr
    assert "  mine: 2" in done.stdout and "preset: embedded" in done.stdout
