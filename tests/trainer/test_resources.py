"""What each role is built with."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from verl.trainer.config import default_config
from verl.trainer.ppo import resources
from verl.trainer.ppo.resources import ResourcePoolManager, Role, start_ranks, worker_env_vars


def test_the_critic_knows_the_response_length_its_loss_may_be_scaled_by(monkeypatch) -> None:
    built: dict[Any, dict[str, Any]] = {}

    def record(cls: Any, **arguments: Any) -> str:
        built[cls] = arguments
        return cls

    sent: list[str] = []
    group = SimpleNamespace(
        spawn=lambda prefix_set: {name: name for name in prefix_set},
        execute_all_async=sent.append,
        wait_until_started=lambda: sent.append("waited"),
        get=lambda refs, method, timeout, key: [],
    )
    monkeypatch.setattr(resources, "RayClassWithInitArgs", record)
    monkeypatch.setattr(resources, "create_colocated_worker_cls", lambda class_dict: class_dict)
    monkeypatch.setattr(resources, "RayWorkerGroup", lambda **arguments: group)
    config = default_config("preset=embedded", "data.max_response_length=33")
    pools = ResourcePoolManager({"pool": [2]}, {role: "pool" for role in Role}, use_gpu=False)
    ranks = start_ranks(config, {Role.ActorRollout: "actor", Role.Critic: "critic"}, pools, use_critic=True)
    assert ranks.groups().critic == "critic" and built["critic"]["response_length"] == 33
    assert built["critic"]["device"] == built["actor"]["device"] == "cpu"
    ranks.wait()
    assert sent == ["warm_up", "waited"]


def test_compiled_kernels_are_kept_in_one_folder_unless_the_environment_says_where(monkeypatch, tmp_path) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT"):
        monkeypatch.delenv(name, raising=False)
    overrides = ("preset=embedded", "trainer.device=cuda", f"trainer.compile_cache_dir={tmp_path}")
    variables = worker_env_vars(default_config(*overrides))
    assert variables["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
    assert variables["VLLM_CACHE_ROOT"] == str(tmp_path / "vllm")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/elsewhere")
    variables = worker_env_vars(default_config(*overrides))
    assert "VLLM_CACHE_ROOT" not in variables and "TORCHINDUCTOR_CACHE_DIR" in variables
    for other in ("trainer.compile_cache_dir=null", "trainer.device=cpu"):
        assert "TORCHINDUCTOR_CACHE_DIR" not in worker_env_vars(default_config(*overrides, other))


def test_bars_of_libraries_do_not_fill_the_log_of_a_rank() -> None:
    moves = "from tqdm import tqdm; from transformers.utils.logging import tqdm as theirs; [*tqdm('ab'), *theirs('ab')]"
    variables = worker_env_vars(default_config("preset=embedded"))
    done = subprocess.run([sys.executable, "-c", moves], env=os.environ | variables, capture_output=True, timeout=120)
    assert done.returncode == 0 and b"/2" not in done.stderr
