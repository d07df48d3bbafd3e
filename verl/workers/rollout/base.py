"""What every rollout engine offers, and the small records that travel to it and back.

The primitive is `RolloutEngine.step`: it takes new requests, advances everything that runs by a bounded number of
decode steps and returns what finished. A caller that wants no turn barrier calls it in slices; a caller that wants
everything at once calls `run_to_completion`. Token ids are returned exactly as they were sampled, never through text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_ABORT = "abort"

NamedTensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class SamplingSettings:
    """How one response is drawn.

    temperature 0 is greedy decoding. `top_k` -1 keeps the whole vocabulary. `max_tokens` bounds the response, the end
    token included. `extra` holds further attributes of the engine's own sampling parameters, by name.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 512
    ignore_eos: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"rollout.temperature must be 0 (greedy) or positive, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"rollout.top_p must lie in (0, 1], not {self.top_p}")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"rollout.top_k must be -1 (all tokens) or at least 1, not {self.top_k}")
        if self.max_tokens < 1:
            raise ValueError(f"rollout.response_length must be at least 1, not {self.max_tokens}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass
class RolloutRequest:
    """One prompt to answer once.

    The response is a function of the weights, the prompt, the sampling settings and `seed`: which other requests run
    beside it changes nothing (beyond the rounding of batched matrix products).
    """

    request_id: str
    prompt_ids: np.ndarray  # (prompt_length,) int32, true length
    sampling: SamplingSettings
    seed: int


@dataclass
class RolloutResult:
    """What was sampled for one request."""

    request_id: str
    response_ids: np.ndarray  # (response_length,) int32, exactly as sampled, the end token included
    log_probs: (
        np.ndarray
    )  # (response_length,) float32, of the distribution sampled from (temperature, top-p, top-k applied)
    finish_reason: str  # "stop" | "length" | "abort"


@runtime_checkable
class RolloutEngine(Protocol):
    """The engine of one replica. With tensor parallelism every rank of the replica must make the same calls.

    settings: what it was built from (`EngineSettings`). hf_config: the model's configuration. can_sleep: whether
    `sleep` gives device memory back, and level 2 so forgets the weights.
    """

    settings: Any
    hf_config: Any
    can_sleep: bool

    def step(self, new_requests: Sequence[RolloutRequest], max_steps: int) -> list[RolloutResult]:
        """Add `new_requests`, advance by at most `max_steps` decode steps, return what finished.

        Returns early when nothing is left running. `ValueError` if a request cannot be served (too long, empty); then
        none of `new_requests` was added.
        """
        ...

    def has_unfinished(self) -> bool: ...

    def abort_all(self) -> None:
        """Forget every request that has not finished."""
        ...

    def load_weights(self, weights: NamedTensors) -> None:
        """Take all weights under their Hugging Face names, in model order; tied heads come under both names."""
        ...

    def wake_up(self, tags: list[str] | None = None) -> None: ...

    def sleep(self, level: int = 2) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Log-probs at temperature 1 of tokens 1.. of each sequence given their prefix: (n - 1,) float32 each."""
        ...

    def stats(self) -> dict[str, float]:
        """Cumulative counts since start: `generated_tokens`, `prompt_tokens`, `steps`, `requests`, `busy_s`."""
        ...


def run_to_completion(
    engine: RolloutEngine, requests: Sequence[RolloutRequest], slice_steps: int = 256
) -> Iterator[RolloutResult]:
    """Yield the results of `requests` in the order in which they finish."""
    pending: Sequence[RolloutRequest] = requests
    while pending or engine.has_unfinished():
        yield from engine.step(pending, slice_steps)
        pending = ()
