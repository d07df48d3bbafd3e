"""What each role is built with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from verl.trainer.config import default_config
from verl.trainer.ppo import resources
from verl.trainer.ppo.resources import ResourcePoolManager, Role, create_worker_groups


def test_the_critic_knows_the_response_length_its_loss_may_be_scaled_by(monkeypatch) -> None:
    built: dict[Any, dict[str, Any]] = {}

    def record(cls: Any, **arguments: Any) -> str:
        built[cls] = arguments
        return cls

    group = SimpleNamespace(spawn=lambda prefix_set: {name: name for name in prefix_set})
    monkeypatch.setattr(resources, "RayClassWithInitArgs", record)
    monkeypatch.setattr(resources, "create_colocated_worker_cls", lambda class_dict: class_dict)
    monkeypatch.setattr(resources, "RayWorkerGroup", lambda **arguments: group)
    config = default_config("preset=embedded", "data.max_response_length=33")
    pools = ResourcePoolManager({"pool": [2]}, {role: "pool" for role in Role}, use_gpu=False)
    groups = create_worker_groups(config, {Role.ActorRollout: "actor", Role.Critic: "critic"}, pools, use_critic=True)
    assert groups.critic == "critic" and built["critic"]["response_length"] == 33
    assert built["critic"]["device"] == built["actor"]["device"] == "cpu"
