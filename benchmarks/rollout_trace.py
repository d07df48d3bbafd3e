"""A recorded shape of episodes, and the pieces that replay it through the real rollout loop.

A trace says, for each episode and turn, how many tokens the prompt and the answer have and how long the environment
takes. Replaying it needs no shop and no trained model: prompts are random token ids, answers end at their length, an
environment sleeps. What a driver does for a turn is done all the same: a text of the prompt's size is rendered and
tokenised, the answer is decoded, and the environment's reply comes from another process.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from agent_system.environments.base import EventEnvironments, Observation
from agent_system.environments.session_host import SessionPool
from agent_system.multi_turn_rollout.generation import WorkerGroupClient
from agent_system.multi_turn_rollout.prompt_encoder import PromptEncoder
from verl.workers.rollout.base import RolloutRequest, RolloutResult, SamplingSettings

_REQUEST = re.compile(r"-group(\d+)-member(\d+)-turn(\d+)")
_WORDS = "instruction search results page price color size buy now back to next red cotton men women".split()


@dataclasses.dataclass(frozen=True)
class TraceTurn:
    """One agent step: tokens of the prompt and the answer, seconds in the environment."""

    prompt_tokens: int
    response_tokens: int
    env_seconds: float


class Trace:
    """Episodes in groups of ``group_size``, as lists of turns."""

    def __init__(self, episodes: Sequence[Sequence[TraceTurn]], group_size: int) -> None:
        if not episodes or len(episodes) % group_size or not all(episodes):
            raise ValueError(f"a trace needs episodes with turns, a multiple of --group-size={group_size} of them")
        self.episodes = [list(episode) for episode in episodes]
        self.group_size = group_size

    @property
    def turns(self) -> list[tuple[int, int]]:
        """``(slot, turn)`` of every request."""
        return [(slot, turn) for slot, episode in enumerate(self.episodes) for turn in range(len(episode))]

    @property
    def response_tokens(self) -> int:
        return sum(turn.response_tokens for episode in self.episodes for turn in episode)

    @property
    def prompt_tokens(self) -> int:
        return sum(turn.prompt_tokens for episode in self.episodes for turn in episode)

    def save(self, path: Path) -> None:
        rows = [[dataclasses.astuple(turn) for turn in episode] for episode in self.episodes]
        path.write_text(json.dumps({"group_size": self.group_size, "episodes": rows}), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Trace:
        """The trace that ``save`` wrote."""
        raw = json.loads(path.read_text(encoding="utf-8"))
        return cls([[TraceTurn(*turn) for turn in episode] for episode in raw["episodes"]], raw["group_size"])

    @classmethod
    def draw(
        cls,
        episodes: int,
        group_size: int,
        turns: tuple[int, int],
        prompt_tokens: tuple[int, int],
        response_tokens: tuple[int, int],
        env_seconds: float,
        seed: int = 0,
    ) -> Trace:
        """Uniform draws, ranges inclusive; an environment's time is exponential with mean ``env_seconds``."""
        rng = np.random.default_rng(seed)
        return cls(
            [
                [
                    TraceTurn(
                        int(rng.integers(prompt_tokens[0], prompt_tokens[1] + 1)),
                        int(rng.integers(response_tokens[0], response_tokens[1] + 1)),
                        float(rng.exponential(env_seconds)) if env_seconds > 0 else 0.0,
                    )
                    for _ in range(rng.integers(turns[0], turns[1] + 1))
                ]
                for _ in range(episodes)
            ],
            group_size,
        )


class TracePrompts:
    """The prompts of a trace as random token ids; the first ``shared`` tokens of all are the same."""

    def __init__(self, trace: Trace, vocabulary: int, shared: int = 0, seed: int = 1) -> None:
        rng = np.random.default_rng(seed)
        head = rng.integers(0, vocabulary, shared, dtype=np.int32)
        self.ids = {
            (slot, turn): rng.integers(0, vocabulary, trace.episodes[slot][turn].prompt_tokens, dtype=np.int32)
            for slot, turn in trace.turns
        }
        for ids in self.ids.values():
            ids[: min(shared, len(ids) - 1)] = head[: min(shared, len(ids) - 1)]

    def request(self, name: str, slot: int, turn: int, sampling: SamplingSettings) -> RolloutRequest:
        return RolloutRequest(f"{name}-{slot}-{turn}", self.ids[slot, turn], sampling, seed=slot * 1000 + turn)


class TraceEncoder(PromptEncoder):
    """Renders and tokenises the text it is given, and then puts the trace's token ids in its place."""

    def __init__(self, tokenizer: Any, prompts: TracePrompts) -> None:
        super().__init__(tokenizer, max_length=1 << 30, truncation="error", template_kwargs={}, history_length=0)
        self._prompts = prompts

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        super().encode(texts)
        places = [tuple(map(int, text.split(" ", 1)[0].split("/"))) for text in texts]
        return [self._prompts.ids[place] for place in places]


class _SleepingSession:
    def reset(self, task: Any) -> dict[str, Any]:
        return {}

    def step(self, action: float) -> dict[str, Any]:
        time.sleep(action)
        return {}


class TraceEnvironments(EventEnvironments):
    """Episodes of a trace in session processes that sleep as long as the trace says."""

    def __init__(self, trace: Trace, num_hosts: int) -> None:
        self.num_episodes, self.group_size = len(trace.episodes), trace.group_size
        self._trace = trace
        self._turn = [0] * self.num_episodes
        self._pool = SessionPool(lambda: _SleepingSession, num_hosts)
        self._pool.wait_until_built()
        rng = np.random.default_rng(2)
        self._filler = " ".join(rng.choice(_WORDS, 4096))

    def begin(
        self, groups: Sequence[int], kwargs: Sequence[Any] | None = None, attempt: int = 0, block: int = 0
    ) -> list[ray.ObjectRef]:
        slots = [group * self.group_size + member for group in groups for member in range(self.group_size)]
        for slot in slots:
            self._turn[slot] = 0
        return self._pool.submit_resets([(slot, None) for slot in slots])

    def submit_steps(self, actions: Sequence[tuple[int, str]]) -> list[ray.ObjectRef]:
        steps = []
        for slot, _ in actions:
            steps.append((slot, self._trace.episodes[slot][self._turn[slot]].env_seconds))
            self._turn[slot] += 1
        return self._pool.submit_steps(steps)

    def collect(self, ref: ray.ObjectRef) -> list[tuple[int, Observation]]:
        return [(slot, self._observe(slot)) for slot, _ in self._pool.collect(ref)]

    def expire(self, ref: ray.ObjectRef, reason: str) -> list[tuple[int, Observation]]:
        return [(slot, Observation.failed(reason)) for slot, _ in self._pool.expire(ref, reason)]

    def restart(self, slot: int) -> list[ray.ObjectRef]:
        self._turn[slot] = 0
        return self._pool.submit_resets([(slot, None)], fresh=True)

    def finish(self, slot: int) -> list[ray.ObjectRef]:
        return []

    def close(self) -> None:
        self._pool.close()

    def _observe(self, slot: int) -> Observation:
        turn, episode = self._turn[slot], self._trace.episodes[slot]
        if turn == len(episode):
            return Observation(done=True, reward=1.0)
        return Observation(prompt=f"{slot}/{turn} " + self._filler[: 4 * episode[turn].prompt_tokens])


class ForcedLengthClient(WorkerGroupClient):
    """The real client; each request's answer gets the length that the trace has for it."""

    def __init__(self, worker_group: Any, trace: Trace) -> None:
        super().__init__(worker_group)
        self._trace = trace

    def submit(self, replica: int, requests: Sequence[RolloutRequest], max_steps: int) -> ray.ObjectRef:
        return super().submit(replica, [self._forced(request) for request in requests], max_steps)

    def _forced(self, request: RolloutRequest) -> RolloutRequest:
        found = _REQUEST.search(request.request_id)
        assert found is not None, f"{request.request_id} is no request of the rollout loop"
        group, member, turn = map(int, found.groups())
        length = self._trace.episodes[group * self._trace.group_size + member][turn].response_tokens
        return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, max_tokens=length))


def check_lengths(results: Sequence[RolloutResult], expected: int) -> None:
    """Every arm must have generated the same tokens, or its figure means nothing."""
    got = sum(len(result.response_ids) for result in results)
    if got != expected:
        raise RuntimeError(f"{got} tokens were generated where the trace has {expected}")
