"""``WebAgentTextEnv-v0`` for gym and for gymnasium: the text environment behind today's five-tuple API.

    import gymnasium
    import agent_system.environments.env_package.webshop.gym_faces
    env = gymnasium.make("WebAgentTextEnv-v0", observation_mode="text", num_products=1000)
    observation, info = env.reset(options={"session": 5})

Importing this module registers with those of the two libraries that are imported already, :func:`register` with all
that are installed. The import can be left out: ``gymnasium.make("<this module>:WebAgentTextEnv-v0")``, and gym itself
finds the environment through an entry point of this package.

Observations and actions are texts; no finite character set covers what product data may hold, so the spaces here take
any text. ``reset(seed=...)`` seeds the draw of the goal; the goal list itself does not depend on it. The four-tuple of
old is :class:`.text_env.WebAgentTextEnv` itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import sys
from functools import cache
from types import ModuleType
from typing import Any

__all__ = ["ENVIRONMENT_ID", "LIBRARIES", "environment_class", "register"]

ENVIRONMENT_ID = "WebAgentTextEnv-v0"
LIBRARIES = ("gymnasium", "gym")

_SAMPLE_WORDS = ("black", "shoes", "water", "bottle", "soft", "cotton", "lamp", "organic", "tea", "chair")
_SAMPLE_CLICKS = ("back to search", "next >", "< prev", "description", "features", "reviews", "buy now")


def register() -> list[str]:
    """Make the environment known to each of the two libraries that is installed; returns their names.

    Registering twice is harmless.
    """
    found = [name for name in LIBRARIES if importlib.util.find_spec(name) is not None]
    for name in found:
        register_with(name)
    return found


def register_gymnasium() -> None:
    """For the entry point ``gymnasium.envs``, which gymnasium calls when it is imported."""
    register_with("gymnasium")


def register_gym() -> None:
    """For the entry point ``gym.envs``, which gym calls when it is imported."""
    register_with("gym")


def register_with(library: str) -> None:
    """Register with one library. gym's checker of steps needs a name that NumPy 2 dropped, so it stays off there."""
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


for _library in LIBRARIES:
    if _library in sys.modules:
        try:
            register_with(_library)
        except ImportError:  # the library is being imported at this moment; its entry point registers
            continue
