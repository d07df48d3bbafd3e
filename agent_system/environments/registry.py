"""Environments by name.

::

    @register_environment("my_shop")
    def make_my_shop(config) -> tuple[EnvironmentManagerBase, EnvironmentManagerBase | None]:
        ...

and ``env.env_name=my_shop`` plays in it. A registered name is found when it is the whole of ``env.env_name`` or,
failing that, a part of it, in any case: ``Webshop`` and ``alfworld/AlfredTWEnv`` name ``webshop`` and ``alfworld``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agent_system.environments.base import EnvironmentManagerBase

MakeEnvironments = Callable[[Any], "tuple[EnvironmentManagerBase, EnvironmentManagerBase | None]"]

_MAKERS: dict[str, MakeEnvironments] = {}


def register_environment(name: str) -> Callable[[MakeEnvironments], MakeEnvironments]:
    """Decorator for a function that builds ``(training manager, validation manager)`` from the run's config.

    Raises:
        ValueError: the name is taken by another function.
    """
    key = name.lower()

    def register(maker: MakeEnvironments) -> MakeEnvironments:
        present = _MAKERS.setdefault(key, maker)
        if present is not maker and (present.__module__, present.__qualname__) != (
            maker.__module__,
            maker.__qualname__,
        ):
            raise ValueError(f"the environment name '{key}' is taken by {present.__module__}.{present.__qualname__}")
        _MAKERS[key] = maker
        return maker

    return register


def environment_names() -> list[str]:
    """Registered names in the order of registration."""
    return list(_MAKERS)


def find_environment(env_name: str) -> MakeEnvironments:
    """The maker that ``env_name`` means: the same name, else the first registered name that is part of it.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    wanted = str(env_name).lower()
    if wanted in _MAKERS:
        return _MAKERS[wanted]
    for name, maker in _MAKERS.items():
        if name in wanted:
            return maker
    raise ValueError(f"env.env_name={env_name} is not a known environment; there are: {', '.join(environment_names())}")
