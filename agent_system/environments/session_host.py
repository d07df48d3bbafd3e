"""Environment sessions in worker processes: many sessions a process, one process unable to hurt another.

A *session* is one episode's environment: ``reset(task)`` and ``step(action)``, both returning a raw reply (a dict). A
``SessionHost`` is a Ray actor that holds many of them and whatever they share. A ``SessionPool`` is the driver's side:
it spreads slots over hosts, remembers which slots a pending reply is for, and replaces a host that died or hangs.

What goes wrong comes back as a raw reply ``{"error": text, "blameless": bool}`` for exactly the slots concerned. A
session whose code raised or ran over its time is to blame. When a whole host is lost, the session it was working on
is, and its other sessions are blameless. A host leaves the name of that session in a small file (memory-mapped, so it
outlives the process), because replies that were on their way are lost with the process and would mislead. Where the
driver cannot read the file, on another machine, the sessions of the first unanswered call are to blame.
"""

from __future__ import annotations

import itertools
import logging
import math
import mmap
import os
import shutil
import signal
import tempfile
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ray
import ray.cloudpickle
from ray.exceptions import RayActorError, RayError, RayTaskError

from verl.utils.lost_actors import constructor_failed, full_ray_disk, last_exception_in, loss_cause, plain_text

logger = logging.getLogger(__name__)

Raw = Mapping[str, Any]


class Session(Protocol):
    """One episode's environment, used over and over."""

    def reset(self, task: Any) -> Raw: ...

    def step(self, action: Any) -> Raw: ...


SessionFactory = Callable[[], Session]
HostBuilder = Callable[[], SessionFactory]
"""Runs once in every host (opens what the sessions share) and returns the factory of its sessions. Picklable."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises ``TimeoutError`` inside the block after ``seconds``; works in a main thread only, elsewhere no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expired(signum: int, frame: Any) -> None:
        raise TimeoutError(f"took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class _Marker:
    """The name of the session that a host is working on, in a file that outlives the process."""

    _SIZE = 256

    def __init__(self, path: Path) -> None:
        self._memory: mmap.mmap | None = None
        if path.parent.is_dir():  # it is not there on another machine than the driver's
            path.write_bytes(bytes(self._SIZE))
            with path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), self._SIZE)

    def write(self, name: str) -> None:
        if self._memory is not None:
            self._memory[:] = name.encode()[: self._SIZE].ljust(self._SIZE, b"\0")

    @staticmethod
    def read(path: Path) -> str | None:
        """The name that was left; empty if the host was between two sessions, None if it left no file."""
        return path.read_bytes().rstrip(b"\0").decode() if path.exists() else None


class SessionHost:
    """Many sessions in one process; a plain class, made a Ray actor by ``SessionPool``."""

    def __init__(self, builder: HostBuilder, reset_limit_s: float, step_limit_s: float, marker_path: Path) -> None:
        self._builder = builder
        self._factory: SessionFactory | None = None
        self._reset_limit_s = reset_limit_s
        self._step_limit_s = step_limit_s
        self._marker = _Marker(marker_path)
        self._sessions: dict[str, Session] = {}

    def reset(self, tasks: Sequence[tuple[str, Any]], fresh: bool = False) -> list[Raw]:
        """Starts a task in each named session; ``fresh`` makes new sessions instead of using those there are."""
        self.build()
        return [self._guarded(self._reset_one, name, task, fresh, limit=self._reset_limit_s) for name, task in tasks]

    def step(self, actions: Sequence[tuple[str, Any]]) -> list[Raw]:
        return [self._guarded(self._step_one, name, action, limit=self._step_limit_s) for name, action in actions]

    def build(self) -> int:
        """Runs the builder if it has not run yet; returns the process id."""
        if self._factory is None:
            self._factory = self._builder()
        return os.getpid()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Result of ``function(session_factory, *args)``: for questions about what the sessions share."""
        self.build()
        return function(self._factory, *args)

    def _reset_one(self, name: str, task: Any, fresh: bool) -> Raw:
        if fresh or name not in self._sessions:
            assert self._factory is not None, "reset builds the factory first"
            self._sessions[name] = self._factory()
        return self._sessions[name].reset(task)

    def _step_one(self, name: str, action: Any) -> Raw:
        if name not in self._sessions:
            return {"error": "the session is gone: its process was replaced", "blameless": True}
        return self._sessions[name].step(action)

    def _guarded(self, function: Callable[..., Raw], name: str, *args: Any, limit: float) -> Raw:
        self._marker.write(name)
        try:
            with _time_limit(limit):
                reply = function(name, *args)
            if not isinstance(reply, Mapping):
                raise TypeError(f"a session's reset and step have to return a dict, not {type(reply).__name__}")
            return reply
        except Exception as error:  # any error of environment code is this session's own
            self._sessions.pop(name, None)
            return {"error": f"{type(error).__name__}: {error}", "blameless": False}
        finally:
            self._marker.write("")


def count_hosts(num_episodes: int, cpus_per_episode: float, num_workers: int | None = None) -> int:
    """Number of host processes: what was asked for, else the CPUs the episodes count for, at most half of Ray's."""
    if num_workers is not None:
        return max(1, min(num_workers, num_episodes))
    available = int(ray.cluster_resources().get("CPU", 1))
    return max(1, min(math.ceil(num_episodes * cpus_per_episode), available // 2))


class SessionPool:
    """Slots spread over host processes.

    Args:
        builder: what each host runs once.
        num_hosts: number of host processes.
        num_gpus: GPUs that Ray reserves for each host.
        reset_limit_s: time limit of one session reset, seconds.
        step_limit_s: time limit of one session step, seconds.
        start_limit_s: time limit of building a host, seconds.

    The hosts take no logical CPU from Ray: a share of a core per episode is a rule for how many there are, and
    must not keep the training ranks from being placed.

    Raises:
        ValueError: ``builder`` cannot be sent to another process.
    """

    def __init__(
        self,
        builder: HostBuilder,
        num_hosts: int,
        *,
        num_gpus: float = 0,
        reset_limit_s: float = 300,
        step_limit_s: float = 120,
        start_limit_s: float = 1200,
    ) -> None:
        _check_sendable(builder)
        self._arguments = (builder, reset_limit_s, step_limit_s)
        self._start_limit_s = start_limit_s
        self._actor_class = ray.remote(num_cpus=0, num_gpus=num_gpus, max_restarts=0, scheduling_strategy="SPREAD")(
            SessionHost
        )
        self._folder = Path(tempfile.mkdtemp(prefix="agent-sessions-"))
        self._remove_folder = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._host_names = itertools.count()
        self._hosts = [self._new_host() for _ in range(num_hosts)]
        self._pending: dict[ray.ObjectRef, _Pending] = {}  # in the order of submission
        self._blamed: dict[str, set[str]] = {}  # name of a lost host -> its sessions that are to blame

    @property
    def num_hosts(self) -> int:
        return len(self._hosts)

    def wait_until_built(self) -> list[int]:
        """Waits for every host to have run its builder; returns their process ids.

        Raises:
            ValueError: what the builder raised for a user's mistake, as it was raised.
            TimeoutError: a host was not built in time.
            RuntimeError: the process of a host ended meanwhile.
        """
        refs = [host.actor.build.remote() for host in self._hosts]
        ready, late = ray.wait(refs, num_returns=len(refs), timeout=self._start_limit_s)
        if late:
            raise TimeoutError(
                f"{len(late)} of {len(refs)} environment processes were not ready within "
                f"trainer.start_timeout={self._start_limit_s} s"
            )
        try:
            return ray.get(ready)
        except RayTaskError as error:
            if isinstance(error.cause, ValueError):
                raise error.cause from None
            raise
        except RayActorError as error:
            if constructor_failed(error):
                kind, message = last_exception_in(plain_text(error))
                raise RuntimeError(f"an environment process could not start: {kind}: {message}") from error
            raise RuntimeError(
                f"an environment process ended while it was being built: {loss_cause()}; {len(refs)} were started, "
                "env.num_workers says how many"
            ) from error

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Result of ``function(session_factory, *args)`` in the first host."""
        return ray.get(self._hosts[0].actor.call.remote(function, *args), timeout=self._start_limit_s)

    def submit_resets(
        self, tasks: Sequence[tuple[int, Any]], namespace: str = "", fresh: bool = False
    ) -> list[ray.ObjectRef]:
        """Starts tasks: ``(slot, task)`` pairs. One reference per host concerned."""
        return self._submit("reset", tasks, namespace, fresh)

    def submit_steps(self, actions: Sequence[tuple[int, Any]], namespace: str = "") -> list[ray.ObjectRef]:
        """Acts: ``(slot, action)`` pairs. One reference per host concerned."""
        return self._submit("step", actions, namespace)

    def collect(self, ref: ray.ObjectRef) -> list[tuple[int, Raw]]:
        """Raw replies of a reference that is ready, ``(slot, raw)``; errors for all its slots if its host died."""
        pending = self._pending[ref]
        try:
            replies = ray.get(ref)
        except RayError as error:
            disk = full_ray_disk() if isinstance(error, RayActorError) else None
            reason = f"the environment process died ({type(error).__name__})"
            return self._lost(ref, f"{reason}: {disk}" if disk else reason)
        del self._pending[ref]
        return list(zip(pending.slots, replies, strict=True))

    def expire(self, ref: ray.ObjectRef, reason: str) -> list[tuple[int, Raw]]:
        """Gives up on a reference: its host is ended and replaced, its slots get an error."""
        return self._lost(ref, reason)

    def close(self) -> None:
        """Ends all hosts; a second call does nothing."""
        for host in self._hosts:
            ray.kill(host.actor)
        self._hosts = []
        self._pending.clear()
        self._remove_folder()

    def _submit(self, method: str, items: Sequence[tuple[int, Any]], namespace: str, *args: Any) -> list[ray.ObjectRef]:
        by_host: dict[int, list[tuple[int, Any]]] = defaultdict(list)
        for slot, payload in items:
            by_host[slot % len(self._hosts)].append((slot, payload))
        refs = []
        for number, mine in by_host.items():
            host = self._hosts[number]
            slots = [slot for slot, _ in mine]
            names = [f"{namespace}{slot}" for slot in slots]
            payloads = [payload for _, payload in mine]
            ref = getattr(host.actor, method).remote(list(zip(names, payloads)), *args)
            self._pending[ref] = _Pending(number, host, slots, names)
            refs.append(ref)
        return refs

    def _lost(self, ref: ray.ObjectRef, reason: str) -> list[tuple[int, Raw]]:
        """Errors for the slots of ``ref``, whose host is replaced if it has not been."""
        pending = self._pending[ref]
        if self._hosts[pending.number] is pending.host:
            self._blamed[pending.host.name] = self._find_blamed(pending.host, ref)
            logger.warning("environment process %d is replaced: %s", pending.number, reason)
            ray.kill(pending.host.actor)
            self._hosts[pending.number] = self._new_host()
        del self._pending[ref]
        blamed = self._blamed[pending.host.name]
        return [
            (slot, {"error": reason, "blameless": name not in blamed})
            for slot, name in zip(pending.slots, pending.names)
        ]

    def _find_blamed(self, host: _Host, noticed: ray.ObjectRef) -> set[str]:
        """Names of the sessions that ``host`` was working on when it was lost."""
        name = _Marker.read(self._folder / host.name)
        if name is not None:
            return {name} if name else set()
        for ref, pending in self._pending.items():
            if pending.host is host and (ref is noticed or not _has_result(ref)):
                return set(pending.names)
        return set()

    def _new_host(self) -> _Host:
        name = str(next(self._host_names))
        return _Host(name, self._actor_class.remote(*self._arguments, self._folder / name))


def _check_sendable(builder: HostBuilder) -> None:
    try:
        ray.cloudpickle.dumps(builder)
    except Exception as error:  # pickling runs the objects' own code
        raise ValueError(
            f"{getattr(builder, '__qualname__', builder)} cannot be sent to the environment processes: "
            f"{type(error).__name__}: {error}; if it is in a file, give actor_rollout_ref.model.external_lib an "
            "importable module instead and set PYTHONPATH"
        ) from error


@dataclass(frozen=True)
class _Host:
    name: str
    actor: Any


@dataclass(frozen=True)
class _Pending:
    """A call on its way: which host works on it, for which slots."""

    number: int
    host: _Host
    slots: list[int]
    names: list[str]


def _has_result(ref: ray.ObjectRef) -> bool:
    if not ray.wait([ref], timeout=0)[0]:
        return False
    try:
        ray.get(ref)
    except RayError:
        return False
    return True
