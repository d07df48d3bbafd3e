from __future__ import annotations

from types import SimpleNamespace

import pytest
from support import make_config

from agent_system.environments import registry
from agent_system.environments.base import EnvironmentManagerBase, EventEnvironments
from agent_system.environments.env_manager import make_envs, make_webshop
from agent_system.environments.registry import environment_names, find_environment, register_environment


@pytest.fixture
def own_names(monkeypatch):
    monkeypatch.setattr(registry, "_MAKERS", dict(registry._MAKERS))


@pytest.mark.parametrize("name", ["webshop", "Webshop", "WebShop-1k", "my/webshop/env", "webshop_v2", "webshop2"])
def test_a_name_is_found_whole_or_as_a_whole_part_in_any_case(name):
    assert find_environment(name) is make_webshop


@pytest.mark.parametrize("name", ["notwebshopatall", "webshops", "frozenlake", ""])
def test_an_unknown_name_lists_those_there_are(name):
    with pytest.raises(ValueError, match=rf"env\.env_name={name} is not .*webshop"):
        make_envs(make_config(env__env_name=name))


def test_a_misspelt_name_is_answered_by_the_one_that_was_meant():
    with pytest.raises(ValueError, match=r"env\.env_name=Webshp .*did you mean webshop\? There are webshop"):
        find_environment("Webshp")


class Manager(EnvironmentManagerBase):
    pass


class Episodes(EventEnvironments):
    begin = submit_steps = collect = expire = restart = finish = reset = step = close = success_evaluator = None
    num_episodes = 4


def register(name, made):
    @register_environment(name)
    def make(config):
        return made

    return make


@pytest.mark.usefixtures("own_names")
def test_an_own_environment_is_one_decorator_away():
    pair = Manager(None, None, None), None
    register("Frozen", pair)
    assert "frozen" in environment_names()
    assert make_envs(make_config(env__env_name="frozen/lake")) == pair
    with pytest.raises(ValueError, match="taken by"):
        register_environment("frozen")(lambda config: None)


@pytest.mark.usefixtures("own_names")
def test_the_longest_whole_part_is_meant_and_a_misspelt_longer_name_is_not_its_shorter_part(caplog):
    rich, short = (register(name, (Manager(None, None, None), None)) for name in ("webshop_rich", "shop"))
    assert find_environment("webshop_rich") is find_environment("my/webshop_rich-v2") is rich
    assert find_environment("webshop") is make_webshop and find_environment("my_shop") is short
    with pytest.raises(ValueError, match="did you mean webshop_rich"):
        find_environment("webshop_rihc")
    make_envs(make_config(env__env_name="Shop"))
    assert "is read as" not in caplog.text
    make_envs(make_config(env__env_name="shop-1k"))
    assert caplog.messages == ["env.env_name=shop-1k is read as shop"]


_MANAGER = Manager(None, None, None)


@pytest.mark.usefixtures("own_names")
@pytest.mark.parametrize(
    ("made", "found"),
    [(_MANAGER, "returned Manager:"), (None, "returned None:"), ((_MANAGER,) * 3, "returned 3 values:"),
     ((None, _MANAGER), "training manager None"), ((Manager, Manager), "Manager, a class and not an object"),
     (("train", None), "training manager str, which has no reset, step"),
     ((_MANAGER, Episodes()), "validation manager Episodes, whose group_size is None")],
)  # fmt: skip
def test_a_factory_that_returns_something_else_is_told_what_to_return(made, found):
    register("count", made)
    expected = rf"env\.env_name=count returned.*{found[9:] if found.startswith('returned') else found}"
    with pytest.raises(ValueError, match=rf"{expected}.*\(training manager, validation manager\)"):
        make_envs(make_config(env__env_name="count"))


def test_sizes_that_make_no_environment():
    with pytest.raises(ValueError, match=r"env\.rollout\.n must be an integer"):
        make_envs(make_config(env__rollout=SimpleNamespace(n="8")))
    with pytest.raises(ValueError, match=r"env\.rollout\.n=0 has to be at least 1"):
        make_envs(make_config(env__rollout=SimpleNamespace(n=0)))
    with pytest.raises(ValueError, match=r"actor_rollout_ref\.rollout\.val_kwargs\.n=-1 has to be at least 1"):
        make_envs(make_config(actor_rollout_ref__rollout__val_kwargs__n=-1))
    with pytest.raises(ValueError, match=r"data\.val_batch_size"):
        make_envs(make_config(data__val_batch_size=None))
