"""gym and gymnasium: both checkers pass, and an episode through either is the text environment's."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest

from agent_system.environments.env_package.webshop import gym_faces
from agent_system.environments.env_package.webshop.session import ShopServer, load_shop
from agent_system.environments.env_package.webshop.text_env import WebAgentTextEnv


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"num_products": 200, "cache_dir": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def shop(arguments: dict[str, Any]) -> ShopServer:
    return load_shop(arguments)


def api_of(library: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(library)


@pytest.mark.parametrize("library", gym_faces.LIBRARIES)
def test_the_environment_checker_passes(
    library: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    api = api_of(library)
    if not hasattr(np, "bool8"):
        monkeypatch.setattr(np, "bool8", np.bool_, raising=False)  # gym's checker names it, NumPy 2 dropped it
    env = api.make(gym_faces.ENVIRONMENT_ID, observation_mode="text", **arguments)
    check = importlib.import_module(f"{library}.utils.env_checker").check_env
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(env.unwrapped, skip_render_check=True)
    assert [str(entry.message) for entry in caught if issubclass(entry.category, UserWarning)] == []


@pytest.mark.parametrize("library", gym_faces.LIBRARIES)
def test_an_episode_is_the_text_environments(library: str, shop: ShopServer) -> None:
    api = api_of(library)
    env = api.make(gym_faces.ENVIRONMENT_ID, server=shop, observation_mode="text", disable_env_checker=True)
    plain = WebAgentTextEnv("text", server=shop)
    observation, info = env.reset(options={"session": 7})
    assert observation == plain.reset(session=7)[0]
    assert info["available_actions"] == plain.get_available_actions()
    assert shop.goals[7].instruction_text in info["instruction_text"]
    for action in ("search[soft shirt]", "think", "click[next >]", "click[back to search]", "search[hoodie]"):
        observation, reward, terminated, truncated, info = env.step(action)
        assert (observation, reward, terminated) == plain.step(action)[:3] and not truncated
    asin = info["available_actions"]["clickables"][2]
    env.step(f"click[{asin}]")
    plain.step(f"click[{asin}]")
    observation, reward, terminated, _, _ = env.step("click[buy now]")
    assert (observation, reward, terminated) == plain.step("click[buy now]")[:3] and terminated
    env.close()


@pytest.mark.parametrize("library", gym_faces.LIBRARIES)
def test_seeds_fix_the_goal(library: str, shop: ShopServer) -> None:
    api_of(library)
    env = gym_faces.environment_class(library)(server=shop, observation_mode="text", render_mode="ansi")
    first = [env.reset(seed=seed)[0] for seed in range(6)]
    assert first == [env.reset(seed=seed)[0] for seed in range(6)] and len(set(first)) > 1
    assert "[button] Search [button_]" in env.render()
    with pytest.raises(ValueError, match="ansi"):
        gym_faces.environment_class(library)(server=shop, render_mode="human")


@pytest.mark.parametrize("library", gym_faces.LIBRARIES)
@pytest.mark.parametrize(
    ("imports", "name"),
    [
        ("import agent_system; import {library}", gym_faces.ENVIRONMENT_ID),
        ("import {library}; import agent_system", gym_faces.ENVIRONMENT_ID),
        ("import {library}", f"agent_system:{gym_faces.ENVIRONMENT_ID}"),
    ],
)
def test_make_finds_it_whatever_is_imported_first(
    library: str, imports: str, name: str, arguments: dict[str, Any], shop: ShopServer
) -> None:
    api_of(library)
    code = (
        f"{imports.format(library=library)}\n"
        f"env = {library}.make({name!r}, **{arguments!r})\n"
        "env.reset(seed=1)\n"
        "assert env.step('search[shirt]')[2:4] == (False, False)\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=300, capture_output=True)


def test_importing_the_package_imports_neither_library() -> None:
    code = "import agent_system, sys; assert not {'gym', 'gymnasium', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, capture_output=True)


def test_registering_twice_is_harmless_and_other_libraries_are_refused() -> None:
    api = api_of("gymnasium")
    gym_faces.register_with("gymnasium")
    spec = api.spec(gym_faces.ENVIRONMENT_ID)
    gym_faces.register_with("gymnasium")
    assert api.spec(gym_faces.ENVIRONMENT_ID) is spec
    with pytest.raises(ValueError, match="gymnasium and gym"):
        gym_faces.environment_class("other")
