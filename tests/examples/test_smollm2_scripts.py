"""The SmolLM2 runs: their keys compose, and the two algorithms differ in nothing but the estimator."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.signalled_script import SIGNALS, end_by_signal

ROOT = Path(__file__).resolve().parents[2]
MODEL = "pkg://agent_system.environments.env_package.webshop/embedded_model"


def _environment(work: Path, **more: str) -> dict[str, str]:
    return {
        **os.environ, "PYTHON": sys.executable, "SEED": "3", "WORK": str(work), "MODEL": MODEL, "PYTHONPATH": str(ROOT),
        "HOME": str(work), **more,
    }  # fmt: skip


def _values(tmp_path: Path, algorithm: str) -> dict[str, str]:
    """Key and value of every setting, as ``explain=true`` prints them."""
    done = subprocess.run(
        ["bash", str(ROOT / "examples/smollm2/learn.sh"), "explain=true", "trainer.device=cpu"],
        env=_environment(tmp_path, ALGO=algorithm), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    words = (line.split() for line in done.stdout.splitlines())
    return {word[0]: word[1] for word in words if len(word) > 2 and re.fullmatch(r"[a-z_.]+", word[0])}


def _nameless(folder: str) -> str:
    """A path without what names the run in it: the temporary folder of each is its own."""
    return re.sub(r"smol_\d+_\d+", "smol", folder)


def test_runs_of_other_folders_share_no_temporary_one(tmp_path: Path) -> None:
    caches = [_values(tmp_path / work, "gigpo")["trainer.compile_cache_dir"] for work in ("one", "two")]
    assert caches[0] != caches[1]


def test_gigpo_and_grpo_differ_in_the_estimator_alone(tmp_path: Path) -> None:
    gigpo, grpo = (_values(tmp_path, name) for name in ("gigpo", "grpo"))
    differing = {key: (value, grpo[key]) for key, value in gigpo.items() if grpo[key] != value}
    assert differing.pop("algorithm.adv_estimator") == ("gigpo", "grpo")
    assert differing.pop("algorithm.norm_adv_by_std_in_grpo") == ("true", "false")  # read by GRPO alone
    assert differing.pop("trainer.experiment_name") == ("gigpo_seed3", "grpo_seed3")
    for first, second in differing.values():  # what is left are folders
        assert _nameless(first.replace("gigpo_seed3", "grpo_seed3")) == _nameless(second)
    assert (gigpo["algorithm.gigpo.mode"], gigpo["algorithm.gigpo.step_advantage_w"]) == ("mean_norm", "1")
    assert (gigpo["env.seed"], gigpo["actor_rollout_ref.rollout.seed"], gigpo["data.seed"]) == ("3", "3", "4")


def test_runs_side_by_side_are_reported_each_and_failures_counted(tmp_path: Path) -> None:
    work = tmp_path / "a folder (1) of runs"
    done = subprocess.run(
        ["bash", str(ROOT / "examples/smollm2/compare.sh"), "explain=true", "trainer.device=cpu"],
        env=_environment(work, ALGOS="gigpo chess", SEEDS="3", GPUS="0"), capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "gigpo_seed3 ended, 0 lines of metrics" in done.stdout
    assert "chess_seed3 failed with exit code 2" in done.stdout and "ALGO=chess has to be gigpo or grpo" in done.stdout
    assert f"{work}/gigpo_seed3" in (work / "gigpo_seed3.log").read_text()


def test_the_start_is_tuned_as_long_whatever_the_runs_are_told(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    told = {"PYTHON": str(python), "STEPS": "3", "GPUS": "0", "GGUF": "model.gguf"}
    for more, steps in (({}, "200"), ({"SFT_STEPS": "7"}, "7")):
        done = subprocess.run(
            ["bash", str(ROOT / "examples/smollm2/make_start.sh")], env=_environment(tmp_path, **told, **more),
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"trainer.total_training_steps={steps} " in done.stdout


@pytest.mark.parametrize(
    ("script", "values", "code", "said"),
    [
        ("learn", {"SEED": "x"}, 2, "learn.sh: SEED=x has to be a whole number, at least 0"),
        ("learn", {"SEED": "08"}, 2, "learn.sh: SEED=08 has to be a whole number"),
        ("learn", {"STEPS": "0"}, 2, "learn.sh: STEPS=0 has to be a whole number, at least 1"),
        ("learn", {"CPUS": "all"}, 2, "learn.sh: CPUS=all has to be a whole number, at least 1"),
        ("compare", {"GPUS": "two"}, 64, "compare.sh: GPUS=two has to be a whole number"),
        ("compare", {"LIMIT": "9m"}, 64, "compare.sh: LIMIT=9m has to be a whole number of seconds"),
        ("compare", {"SEEDS": " "}, 64, "is no run"),
        ("compare", {"SEEDS": "0 1 0"}, 64, "compare.sh: SEEDS=0 1 0 has one of them twice"),
    ],
)
def test_a_wrong_value_is_named_and_nothing_is_made(
    tmp_path: Path, script: str, values: dict[str, str], code: int, said: str
) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / f"examples/smollm2/{script}.sh")], env=_environment(tmp_path / "work", **values),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (code, "") and said in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("sent", "code"), SIGNALS)
def test_the_runs_end_with_the_script(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    trainer = tmp_path / "python"
    trainer.write_text(f'#!/bin/sh\ncase "$*" in *main_ppo*) echo $$ >>{tmp_path}/started; exec sleep 300 ;; esac\n')
    trainer.chmod(0o755)
    environment = _environment(tmp_path, PYTHON=str(trainer), ALGOS="gigpo", SEEDS="0")
    script = ROOT / "examples/smollm2/compare.sh"
    assert end_by_signal(script, environment, tmp_path / "started", sent, code) == 1
