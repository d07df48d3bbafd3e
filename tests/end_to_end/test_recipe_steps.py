"""Every recipe on the embedded default, as a person starts it: one step each; PPO further, and through a resume.

About a minute a script on two cores, so they are a group of their own: ``make test-recipes``.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(str(path.relative_to(ROOT / "examples")) for path in ROOT.glob("examples/*_trainer/run_*.sh"))
SMALL = [
    "env.max_steps=3",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "algorithm.filter_groups.max_num_gen_batches=2",
    "trainer.logger=[console]",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
]
# What shows that a recipe's own part was at work, by words of the script's path.
SIGNS = {
    "gigpo": ["gigpo/anchor_group_size/mean"],
    "dynamic": ["rollout/groups_dropped"],
    "dapo": ["rollout/groups_dropped", "response_length/overlong_share"],
    "plus_plus_trainer/run_webshop.sh": ["actor/reward_kl_penalty"],
    "ppo": ["critic/vf_loss", "critic/vf_clipfrac", "critic/vf_explained_var", "critic/values/mean", "critic/lr"],
}

pytestmark = pytest.mark.recipes


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder of a machine without a GPU: the catalogue is built there once."""
    folder = tmp_path_factory.mktemp("home")
    tools = folder / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n", encoding="utf-8")
    (tools / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', encoding="utf-8")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    return folder


def train(home: Path, folder: Path, script: str, *overrides: str) -> list[dict[str, float]]:
    """Run a script to its end; the lines of metrics.jsonl."""
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / script), *SMALL, f"trainer.default_local_dir={folder}", *overrides],
        capture_output=True, text=True, timeout=550, check=False, stdin=subprocess.DEVNULL,
        env={**os.environ, "PATH": f"{home}/tools:{os.environ['PATH']}", "HOME": str(home), "VIRTUAL_ENV": sys.prefix},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_recipe_takes_a_step_on_the_embedded_default(home: Path, tmp_path: Path, script: str) -> None:
    (step,) = train(home, tmp_path / "run", script, "trainer.total_training_steps=1")
    assert step["step"] == 1 and all(math.isfinite(value) for value in step.values())
    assert step["actor/grad_norm"] >= 0 and step["actor/skipped_steps"] == 0
    for word, metrics in SIGNS.items():
        if word in script:
            assert step.keys() >= set(metrics), metrics
    assert ("actor/kl_loss" in step) == ("actor/kl_coef" in step)
    assert ("critic/vf_loss" in step) == ("ppo" in script)


@pytest.mark.timeout(1700)  # three runs
def test_ppo_with_a_resume_is_ppo_without_one(home: Path, tmp_path: Path) -> None:
    ppo = "ppo_trainer/run_webshop.sh"
    kept = ["trainer.critic_warmup=2", "trainer.save_freq=2", "critic.optim.lr_warmup_steps=3"]
    whole = train(home, tmp_path / "whole", ppo, *kept, "trainer.total_training_steps=3")
    train(home, tmp_path / "parts", ppo, *kept, "trainer.total_training_steps=2")
    parts = train(home, tmp_path / "parts", ppo, *kept, "trainer.total_training_steps=3")
    assert [step["step"] for step in whole] == [1, 2, 3]
    assert ["actor/pg_loss" in step for step in whole] == [False, True, True]  # the critic goes first
    assert [step["critic/lr"] for step in whole] == pytest.approx([0.0, 1e-3 / 3, 2e-3 / 3])
    figures = ("actor/", "critic/", "episode/", "response_length/", "prompt_length/")
    for one, other in zip(whole, parts, strict=True):
        assert {k: v for k, v in one.items() if k.startswith(figures)} == {
            k: v for k, v in other.items() if k.startswith(figures)
        }
    assert (tmp_path / "whole" / "global_step_2" / "critic" / "dist_ckpt").is_dir()
