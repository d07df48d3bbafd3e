from __future__ import annotations

from types import SimpleNamespace

import pytest
from support import make_config

from agent_system.environments import registry
from agent_system.environments.env_manager import make_envs, make_webshop
from agent_system.environments.registry import environment_names, find_environment, register_environment


@pytest.fixture
def own_names(monkeypatch):
    monkeypatch.setattr(registry, "_MAKERS", dict(registry._MAKERS))


@pytest.mark.parametrize("name", ["webshop", "Webshop", "WebShop-1k", "my/webshop/env"])
def test_a_name_is_found_whole_or_in_part_in_any_case(name):
    assert find_environment(name) is make_webshop


def test_an_unknown_name_lists_those_there_are():
    with pytest.raises(ValueError, match=r"env\.env_name=frozenlake .*webshop"):
        make_envs(make_config(env__env_name="frozenlake"))


@pytest.mark.usefixtures("own_names")
def test_an_own_environment_is_one_decorator_away():
    @register_environment("Frozen")
    def make_frozen(config):
        return "train", "val"

    assert "frozen" in environment_names()
    assert make_envs(make_config(env__env_name="frozenlake")) == ("train", "val")
    with pytest.raises(ValueError, match="taken by"):
        register_environment("frozen")(lambda config: None)


@pytest.mark.usefixtures("own_names")
def test_a_whole_name_goes_before_a_part():
    @register_environment("webshop_rich")
    def make_rich(config):
        return None

    assert find_environment("webshop_rich") is make_rich
    assert find_environment("webshop") is make_webshop


def test_sizes_that_make_no_environment():
    with pytest.raises(ValueError, match=r"env\.rollout\.n must be an integer"):
        make_envs(make_config(env__rollout=SimpleNamespace(n="8")))
    with pytest.raises(ValueError, match=r"env\.rollout\.n=0 has to be at least 1"):
        make_envs(make_config(env__rollout=SimpleNamespace(n=0)))
    with pytest.raises(ValueError, match=r"actor_rollout_ref\.rollout\.val_kwargs\.n=-1 has to be at least 1"):
        make_envs(make_config(actor_rollout_ref__rollout__val_kwargs__n=-1))
    with pytest.raises(ValueError, match=r"data\.val_batch_size"):
        make_envs(make_config(data__val_batch_size=None))
