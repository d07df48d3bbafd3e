"""Helpers on plain Python objects: dictionaries, open enumerations, time limits, attribute access."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from queue import Empty
from types import FrameType, SimpleNamespace
from typing import Any, ClassVar

__all__ = [
    "DynamicEnum",
    "DynamicEnumMeta",
    "NestedNamespace",
    "append_to_dict",
    "convert_to_regular_types",
    "timeout_limit",
    "union_two_dict",
]


def union_two_dict(dict1: dict, dict2: Mapping) -> dict:
    """Add the items of ``dict2`` to ``dict1`` (in place) and return ``dict1``.

    Raises:
        AssertionError: a key is in both with different values.
    """
    for key, value in dict2.items():
        if key in dict1:
            assert dict1[key] == value, f"both dictionaries have {key!r}: {dict1[key]!r} and {value!r}"
        dict1[key] = value
    return dict1


def append_to_dict(data: dict[str, list], new_data: Mapping[str, Any]) -> None:
    """Append every value of ``new_data`` to the list under its key in ``data`` (made when missing)."""
    for key, value in new_data.items():
        data.setdefault(key, []).append(value)


class DynamicEnumMeta(type):
    """Iteration, look-up and membership for classes derived from :class:`DynamicEnum`."""

    _registry: dict[str, Any]

    def __iter__(cls) -> Iterator[Any]:
        return iter(cls._registry.values())

    def __contains__(cls, item: object) -> bool:
        if isinstance(item, str):
            return item in cls._registry
        return item in cls._registry.values()

    def __getitem__(cls, name: str) -> Any:
        return cls._registry[name]

    def __len__(cls) -> int:
        return len(cls._registry)

    def names(cls) -> list[str]:
        return list(cls._registry)

    def values(cls) -> list[Any]:
        return list(cls._registry.values())


class DynamicEnum(metaclass=DynamicEnumMeta):
    """An enumeration that users can extend at run time.

    Members are singletons, upper-case attributes of their class, and travel between processes by name. Each subclass
    has its own registry::

        class Colour(DynamicEnum):
            _registry = {}
            _next_value = 0

        Colour.register("red")
        assert Colour.RED is Colour.from_name("red")
    """

    _registry: ClassVar[dict[str, Any]] = {}
    _next_value: ClassVar[int] = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_registry" not in cls.__dict__:
            cls._registry = {}
        if "_next_value" not in cls.__dict__:
            cls._next_value = 0

    def __init__(self, name: str, value: int) -> None:
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self.value}>"

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _dynamic_enum_member, (type(self), self.name)

    @classmethod
    def register(cls, name: str) -> Any:
        """Add the member ``name.upper()`` and return it.

        Raises:
            ValueError: the name is taken.
        """
        key = name.upper()
        if key in cls._registry:
            raise ValueError(f"{cls.__name__}.{key} is already registered")
        member = cls(key, cls._next_value)
        cls._registry[key] = member
        setattr(cls, key, member)
        cls._next_value += 1
        return member

    @classmethod
    def remove(cls, name: str) -> Any:
        """Take the member ``name.upper()`` out and return it; ``KeyError`` when there is none."""
        key = name.upper()
        member = cls._registry.pop(key)
        delattr(cls, key)
        return member

    @classmethod
    def from_name(cls, name: str) -> Any | None:
        """The member called ``name`` (in any case), or ``None``."""
        return cls._registry.get(name.upper())


def _dynamic_enum_member(cls: type[DynamicEnum], name: str) -> Any:
    """Unpickle a member; one that only the sending process had registered is registered here as well."""
    member = cls.from_name(name)
    return member if member is not None else cls.register(name)


def _call_into_queue(queue: Any, func: Callable, args: tuple, kwargs: dict) -> None:
    """Child-process side of :func:`timeout_limit`: send ``(succeeded, result or exception)``."""
    try:
        message = (True, func(*args, **kwargs))
    except Exception as error:  # whatever it is, it is raised again in the caller
        message = (False, error)
    queue.put(message)


def _run_in_process(func: Callable, args: tuple, kwargs: dict, seconds: float, message: str) -> Any:
    context = multiprocessing.get_context("fork" if os.name == "posix" else "spawn")
    queue = context.Queue(maxsize=1)
    process = context.Process(target=_call_into_queue, args=(queue, func, args, kwargs), daemon=True)
    process.start()
    try:
        succeeded, result = _receive(queue, process, seconds, message)
    finally:
        if process.is_alive():
            process.terminate()
        process.join(timeout=1.0)
        if process.is_alive():
            process.kill()
            process.join(timeout=1.0)
        queue.close()
    if succeeded:
        return result
    raise result


def _receive(queue: Any, process: Any, seconds: float, message: str) -> tuple[bool, Any]:
    """Wait for the child's answer, noticing a child that died without one."""
    deadline = time.monotonic() + seconds
    while True:
        remaining = deadline - time.monotonic()
        try:
            return queue.get(timeout=max(0.0, min(remaining, 0.2)))
        except Empty:
            if remaining <= 0:
                raise TimeoutError(message) from None
            if not process.is_alive() and queue.empty():
                raise RuntimeError(f"the child process ended with exit code {process.exitcode} and no result") from None


def timeout_limit(
    seconds: float, use_signals: bool = False, error_message: str = "Function call timed out"
) -> Callable[[Callable], Callable]:
    """Decorator: end a call after ``seconds`` with ``TimeoutError(error_message)``.

    By default the call runs in a forked child process, which also ends calls that hold the interpreter; arguments and
    result must then survive pickling. ``use_signals=True`` interrupts the call in place with ``SIGALRM`` and works only
    in the main thread of a POSIX process.
    """

    def decorate(func: Callable) -> Callable:
        @wraps(func)
        def limited(*args: Any, **kwargs: Any) -> Any:
            if not use_signals:
                return _run_in_process(func, args, kwargs, seconds, error_message)
            if threading.current_thread() is not threading.main_thread():
                raise ValueError("timeout_limit(use_signals=True) works in the main thread only; use use_signals=False")

            def on_alarm(signum: int, frame: FrameType | None) -> None:
                raise TimeoutError(error_message)

            previous = signal.signal(signal.SIGALRM, on_alarm)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                return func(*args, **kwargs)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, previous)

        return limited

    return decorate


class NestedNamespace(SimpleNamespace):
    """A dictionary tree as attributes: ``NestedNamespace({"a": {"b": 1}}).a.b == 1``."""

    def __init__(self, dictionary: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for key, value in dictionary.items():
            setattr(self, key, NestedNamespace(value) if isinstance(value, Mapping) else value)


def convert_to_regular_types(obj: Any) -> Any:
    """Turn OmegaConf containers (at any depth) into plain dictionaries and lists; leave everything else."""
    from omegaconf import DictConfig, ListConfig, OmegaConf

    if isinstance(obj, (DictConfig, ListConfig)):
        return OmegaConf.to_container(obj, resolve=True)
    if isinstance(obj, dict):
        return {key: convert_to_regular_types(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [convert_to_regular_types(value) for value in obj]
    return obj
