"""Environments by name.

::

    @register_environment("my_shop")
    def make_my_shop(config) -> tuple[EnvironmentManagerBase, EnvironmentManagerBase | None]:
        ...

and ``env.env_name=my_shop`` plays in it. A registered name is found when it is the whole of ``env.env_name`` or,
failing that, a whole part of it, in any case: ``Webshop`` and ``alfworld/AlfredTWEnv`` name ``webshop`` and
``alfworld``, ``notwebshop`` names nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agent_system.environments.base import EnvironmentManagerBase, EventEnvironments
from verl.trainer.config.names import environment_meant, unknown_environment

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


def registered_name(env_name: str) -> str:
    """The registered name that ``env_name`` means, see ``environment_meant``.

    Raises:
        ValueError: there is none; the message says which was meant and lists those there are.
    """
    name = environment_meant(str(env_name), _MAKERS)
    if name is None:
        raise ValueError(
            f"{unknown_environment(str(env_name), _MAKERS)}; one of your own is registered by a module that "
            "actor_rollout_ref.model.external_lib names"
        )
    return name


def find_environment(env_name: str) -> MakeEnvironments:
    """The maker of the environment that ``env_name`` means. Raises as ``registered_name`` does."""
    return _MAKERS[registered_name(env_name)]


def checked_managers(env_name: str, made: Any) -> tuple[EnvironmentManagerBase, EnvironmentManagerBase | None]:
    """What a maker returned, ``(training manager, validation manager)``; the second may be None.

    Raises:
        ValueError: it is something else.
    """
    expected = "it has to return (training manager, validation manager); the second may be None"
    factory = f"the factory of env.env_name={env_name}"
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        found = f"{len(made)} values" if isinstance(made, (tuple, list)) else _kind(made)
        raise ValueError(f"{factory} returned {found}: {expected}")
    for role, manager in zip(("training", "validation"), made):
        if manager is None and role == "validation":
            continue
        wrong = _not_a_manager(manager)
        if wrong is not None:
            raise ValueError(f"{factory} returned as {role} manager {_kind(manager)}, {wrong}: {expected}")
    return made[0], made[1]


def _not_a_manager(manager: Any) -> str | None:
    """Why the rollout could not play in ``manager``; None for one it can."""
    if isinstance(manager, type):
        return "a class and not an object of it"
    lacking = [name for name in ("reset", "step", "success_evaluator", "close") if not hasattr(manager, name)]
    if lacking:
        return f"which has no {', '.join(lacking)}"
    if isinstance(manager, EventEnvironments):
        for name in ("num_episodes", "group_size"):
            size = getattr(manager, name, None)
            if not isinstance(size, int) or size < 1:
                return f"whose {name} is {size} and not a number of at least 1, which its constructor has to set"
    return None


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    return value.__name__ if isinstance(value, type) else type(value).__name__
