"""What an environment has to give, checked where it is handed over.

A mistake of an environment's author is a ``ValueError`` that names the class and states the contract, which
``docs/environments.md`` has in full. What an episode's manager says after the episode's end is not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

_NUMBERS = "biuf"  # kinds of numpy's number types
_FLAGS = ("is_action_valid", "is_action_admissible")


class Seen(Protocol):
    """The fields of an ``Observation`` that are checked."""

    prompt: str
    anchor: Any
    reward: float
    done: bool
    info: dict[str, Any]


def number(value: Any) -> float | None:
    """A number, or an array or tensor that holds one, as a float; None for anything else."""
    if isinstance(value, (float, int)):
        return float(value)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # ragged lists; tensors of another device
        return None
    return float(array.reshape(-1)[0]) if array.size == 1 and array.dtype.kind in _NUMBERS else None


def parts_of(call: str, reply: Any, *names: str) -> Sequence[Any]:
    """What ``call`` (such as ``Count.step``) returned, which has to be a tuple of ``names``."""
    if not isinstance(reply, (tuple, list)) or len(reply) != len(names):
        raise ValueError(f"{call} returned {_described(reply)}, it has to return ({', '.join(names)})")
    return reply


def texts_of(call: str, observations: Any) -> Sequence[str]:
    """``observations["text"]`` of a lock-step manager."""
    if not isinstance(observations, Mapping) or not _is_list(observations.get("text")):
        found = repr(sorted(map(str, observations))) if isinstance(observations, Mapping) else _described(observations)
        if isinstance(observations, Mapping) and "text" in observations:
            found = f"'text': {_described(observations['text'])}"
        raise ValueError(
            f'{call} returned observations {found}; they have to be {{"text": one prompt per episode, "image": None, '
            '"anchor": one state per episode}: prompts from images alone are not supported'
        )
    return observations["text"]


def one_each(call: str, name: str, values: Any, episodes: int) -> Sequence[Any]:
    """``values``, of which there has to be one for each of ``episodes``."""
    if not _is_list(values) or len(values) != episodes:
        raise ValueError(
            f"{call} returned {name} {_described(values)}; it has to be one for each of {episodes} episodes"
        )
    return values


def flat(values: Any) -> Any:
    """Numbers of shape ``(episodes, 1)``, as some managers give them, as ``(episodes,)``; anything else as it is."""
    shape = getattr(values, "shape", None)
    return values.reshape(-1) if shape is not None and len(shape) == 2 and shape[1] == 1 else values


def check_observation(call: str, episode: int, seen: Seen) -> None:
    """Checks the kinds of what an episode shows, and that its reward is a finite float32; makes reward and done plain.

    Raises:
        ValueError: names ``call``, the episode and the part.
    """
    wrong = _wrong_part(seen)
    if wrong is not None:
        name, value, expected = wrong
        raise ValueError(f"{call} gave episode {episode} {name} = {_shown(value)}; it has to be {expected}")
    seen.reward, seen.done = number(seen.reward), bool(number(seen.done))


def won(manager: object, infos: Sequence[Mapping[str, Any]], last: int) -> float:
    """``won`` of an episode's last step, which the base's success figure is made of."""
    expected = (
        f'{type(manager).__name__} has to give infos[i]["won"], true or false, at an episode\'s last step. That can be '
        "any step, since env.max_steps ends episodes too; give it at every one (or override _process_batch)"
    )
    if "won" not in infos[last]:
        raise ValueError(f"{expected}; the info of step {last + 1} has {sorted(map(str, infos[last])) or 'no key'}")
    value = number(infos[last]["won"])
    if value is None or not np.isfinite(value):
        raise ValueError(f"{expected}; at step {last + 1} it is {_shown(infos[last]['won'])}")
    return value


def checked_success(manager: object, figures: Any, episodes: int) -> dict[str, np.ndarray]:
    """What ``success_evaluator`` returned, as arrays of numbers.

    ``success_rate`` has a number per episode. Another figure may have NaN where it does not apply, and another length
    where it has no value per episode.
    """
    call = f"{type(manager).__name__}.success_evaluator"
    if not isinstance(figures, Mapping) or "success_rate" not in figures:
        found = f"{sorted(map(str, figures))}" if isinstance(figures, Mapping) else _described(figures)
        raise ValueError(f'{call} returned {found}; it has to return {{"success_rate": one number per episode, …}}')
    checked = {}
    for name, values in figures.items():
        array = np.asarray(values)
        if array.ndim != 1 or not array.size or array.dtype.kind not in _NUMBERS or np.isinf(array).any():
            raise ValueError(f"{call} returned {name} = {_shown(values)}; it has to be an array of finite numbers")
        checked[name] = array
    rate = checked["success_rate"]
    if len(rate) != episodes or np.isnan(rate).any():
        raise ValueError(
            f"{call} returned success_rate = {_shown(rate)}; it has to be a number for each of {episodes} episodes"
        )
    return checked


def check_slots(call: str, started: Any, slots: Sequence[int]) -> None:
    """``(slot, task)`` pairs that groups start with: one for each of their ``slots``."""
    pairs = _is_list(started) and all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in started)
    if not pairs or sorted(slot for slot, _ in started) != sorted(slots):
        found = f"slots {_shown([slot for slot, _ in started])}" if pairs else _described(started)
        raise ValueError(
            f"{call} returned {found}; it has to return (slot, task) for each of the slots {_shown(slots)}"
        )


def references(call: str, refs: Any) -> Sequence[Any]:
    """The references an event-driven method returned."""
    if not _is_list(refs):
        raise ValueError(f"{call} returned {_described(refs)}; it has to return a list of references, [] for none")
    return refs


def _wrong_part(seen: Seen) -> tuple[str, Any, str] | None:
    """Name, value and right form of the first part that is wrong."""
    reward = number(seen.reward)
    with np.errstate(over="ignore"):
        if reward is None or not np.isfinite(np.float32(reward)):
            return "reward", seen.reward, "a finite number"
    if number(seen.done) not in (0.0, 1.0):
        return "done", seen.done, "true or false"
    if not isinstance(seen.info, Mapping):
        return "info", seen.info, "a dict"
    for key in _FLAGS:
        if number(seen.info.get(key, True)) not in (0.0, 1.0):
            return f'info["{key}"]', seen.info[key], "true or false (or left out: true)"
    calls = number(seen.info.get("tool_calling", 0))
    if calls is None or not np.isfinite(calls):
        return 'info["tool_calling"]', seen.info["tool_calling"], "a number (or left out: 0)"
    if seen.done:
        return None  # nobody reads how the state looks
    if not isinstance(seen.prompt, str):
        return "prompt", seen.prompt, "a text"
    if not _is_comparable(seen.anchor):
        return "anchor", seen.anchor, "text, numbers, arrays, or lists and dicts of these"
    return None


def _is_comparable(anchor: Any) -> bool:
    """Whether GiGPO can compare it; see ``gigpo.anchors.to_hashable``."""
    if isinstance(anchor, (list, tuple)):
        return all(map(_is_comparable, anchor))
    if isinstance(anchor, dict):
        return all(map(_is_comparable, anchor.values()))
    return isinstance(anchor, (str, bool, int, float, np.generic, np.ndarray))


def _is_list(values: Any) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, (str, bytes)) or getattr(values, "ndim", 0) >= 1


def _described(value: Any) -> str:
    """What was given, in a few words."""
    if value is None:
        return "None"
    if isinstance(value, (tuple, list)):
        return f"{len(value)} value(s)"
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
