"""``WebAgentTextEnv-v0`` for gym and for gymnasium: the text environment behind today's five-tuple API.

    import agent_system
    import gymnasium
    env = gymnasium.make("WebAgentTextEnv-v0", observation_mode="text", num_products=1000)
    observation, info = env.reset(options={"session": 5})

``import agent_system`` is enough, before or after the import of the library: this module registers with a library that
is imported already, and with another at the moment it is imported, so nobody pays for a library that he does not use.
``gymnasium.make("agent_system:WebAgentTextEnv-v0")`` does without the import. gym also finds the environment by
itself, through an entry point of the installed package; gymnasium has looked at none since its version 1.0.

Observations and actions are texts; no finite character set covers what product data may hold, so the spaces here take
any text. ``reset(seed=...)`` seeds the draw of the goal; the goal list itself does not depend on it. The four-tuple of
old is :class:`.text_env.WebAgentTextEnv` itself.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__ = ["ENVIRONMENT_ID", "LIBRARIES", "environment_class", "register_gym", "register_with"]

ENVIRONMENT_ID = "WebAgentTextEnv-v0"
LIBRARIES = ("gymnasium", "gym")

_SAMPLE_WORDS = ("black", "shoes", "water", "bottle", "soft", "cotton", "lamp", "organic", "tea", "chair")
_SAMPLE_CLICKS = ("back to search", "next >", "< prev", "description", "features", "reviews", "buy now")


def register_gym() -> None:
    """For the entry point ``gym.envs``, which gym calls when it is imported."""
    register_with("gym")


def register_with(library: str) -> None:
    """Register with one library; a second time is harmless.

    gym's checker of steps needs a name that NumPy 2 dropped, so it stays off there.
    """
    registration = importlib.import_module(f"{library}.envs.registration")
    if ENVIRONMENT_ID not in registration.registry:
        registration.register(
            id=ENVIRONMENT_ID,
            entry_point=f"{__name__}:make_{library}",
            disable_env_checker=library == "gym",
        )


def make_gymnasium(**arguments: Any) -> Any:
    """A new environment of gymnasium; arguments as :class:`.text_env.WebAgentTextEnv` takes them."""
    return environment_class("gymnasium")(**arguments)


def make_gym(**arguments: Any) -> Any:
    """A new environment of gym; arguments as :class:`.text_env.WebAgentTextEnv` takes them."""
    return environment_class("gym")(**arguments)


@cache
def environment_class(library: str) -> type:
    """The environment class made for ``gym`` or ``gymnasium``.

    Raises:
        ValueError: another name.
    """
    if library not in LIBRARIES:
        raise ValueError(f"WebShop has faces for {' and '.join(LIBRARIES)}, not for {library!r}")
    api = importlib.import_module(library)
    any_text, shop_action = _spaces(api)

    class TextEnvironment(api.Env):  # type: ignore[name-defined, misc]
        """One shopper. ``render_mode`` "ansi" returns the page with its buttons marked."""

        metadata = {"render_modes": ["ansi"], "render_fps": 1}

        def __init__(self, render_mode: str | None = None, **arguments: Any) -> None:
            from agent_system.environments.env_package.webshop.text_env import WebAgentTextEnv

            if render_mode not in (None, "ansi"):
                raise ValueError(f"render_mode must be None or 'ansi', got {render_mode!r}")
            self.render_mode = render_mode
            self.observation_space = any_text()
            self.action_space = shop_action()
            self._rng = random.Random()
            self.text_env = WebAgentTextEnv(rng=self._rng, **arguments)

        def reset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[str, dict[str, Any]]:
            """Start an episode; ``options`` are those of ``WebAgentTextEnv.reset``: session, instruction_text."""
            super().reset(seed=seed)
            if seed is not None:
                self._rng.seed(seed)
            wanted = dict(options or {})
            if wanted.get("session") is None:  # by number: a drawn session name would keep its first goal for good
                wanted["session"] = self.text_env.server.goals.pick(self._rng)
            observation, _ = self.text_env.reset(**wanted)
            return observation, self._info()

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            """Do one action. A purchase terminates; nothing truncates, there is no limit of steps."""
            observation, reward, done, _ = self.text_env.step(action)
            return observation, float(reward), bool(done), False, self._info()

        def render(self) -> str | None:
            return self.text_env.render() if self.render_mode == "ansi" else None

        def close(self) -> None:
            self.text_env.close()

        def _info(self) -> dict[str, Any]:
            """Actions that are possible now, and what there is to do."""
            return {
                "available_actions": self.text_env.get_available_actions(),
                "instruction_text": self.text_env.get_instruction_text(),
            }

    TextEnvironment.__qualname__ = TextEnvironment.__name__ = f"{library.capitalize()}TextEnvironment"
    return TextEnvironment


def _spaces(api: ModuleType) -> tuple[type, type]:
    """The two spaces as subclasses of this library's ``Space``."""

    class AnyText(api.spaces.Space):  # type: ignore[name-defined, misc]
        """Every text."""

        def __init__(self, seed: int | None = None) -> None:
            super().__init__(shape=None, dtype=None, seed=seed)

        @property
        def is_np_flattenable(self) -> bool:
            return False

        def sample(self, *arguments: Any, **keywords: Any) -> str:
            """A few words."""
            count = int(self.np_random.integers(1, 4))
            return " ".join(_SAMPLE_WORDS[int(i)] for i in self.np_random.integers(len(_SAMPLE_WORDS), size=count))

        def contains(self, x: Any) -> bool:
            return isinstance(x, str)

        def __eq__(self, other: object) -> bool:
            return type(self) is type(other)

        def __hash__(self) -> int:
            return hash(type(self))

        def __repr__(self) -> str:
            return f"{type(self).__name__}()"

    class ShopAction(AnyText):
        """Every text; samples are searches and clicks on what most pages have."""

        def sample(self, *arguments: Any, **keywords: Any) -> str:
            if self.np_random.integers(2):
                return f"search[{super().sample()}]"
            return f"click[{_SAMPLE_CLICKS[int(self.np_random.integers(len(_SAMPLE_CLICKS)))]}]"

    return AnyText, ShopAction


class _RegisterOnImport(MetaPathFinder):
    """Lets the libraries be found as usual, and registers once their modules have run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in LIBRARIES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            register_with(fullname)

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def _register_now_or_later() -> None:
    for library in LIBRARIES:
        if hasattr(sys.modules.get(library), "make"):  # it is imported, and not at this moment
            register_with(library)
    sys.meta_path.insert(0, _RegisterOnImport())


_register_now_or_later()
