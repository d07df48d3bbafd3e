"""Rollouts with the transformers model itself: no vLLM needed, any decoder that transformers runs.

The engine holds its own copy of the model in the rollout dtype. Requests run as one batch with one KV cache,
left-padded: new requests are prefilled together and join the running batch; finished rows leave it, and columns that
no row needs any more are cut. One engine step is one prefill of a bunch or one token for every running row.

Left out: tensor parallelism, paged or shared-prefix caches, and sampling keys beyond temperature, top-p and top-k.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache

from verl.utils.rng import preserved_rng
from verl.workers.rollout.base import (
    FINISH_LENGTH,
    FINISH_STOP,
    NamedTensors,
    RolloutRequest,
    RolloutResult,
    SamplingSettings,
)
from verl.workers.rollout.settings import EngineSettings, check_requests

logger = logging.getLogger(__name__)


@dataclass
class _Row:
    """One running request."""

    request: RolloutRequest
    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class _Batch:
    """The running rows and their cache. `mask` is (rows, length); the rows' last tokens are not in the cache yet."""

    def __init__(self, rows: list[_Row], cache: DynamicCache, mask: torch.Tensor) -> None:
        self.rows, self.cache, self.mask = rows, cache, mask

    def join(self, other: _Batch) -> None:
        """Append the rows of `other`, padding the shorter cache on the left."""
        length = max(self.mask.shape[1], other.mask.shape[1])
        for mine, theirs in zip(self.cache.layers, other.cache.layers):
            mine.keys = torch.cat([_pad_left(mine.keys, length, 2), _pad_left(theirs.keys, length, 2)])
            mine.values = torch.cat([_pad_left(mine.values, length, 2), _pad_left(theirs.values, length, 2)])
        self.mask = torch.cat([_pad_left(self.mask, length, 1), _pad_left(other.mask, length, 1)])
        self.rows += other.rows

    def keep(self, kept: list[int]) -> None:
        """Drop all other rows, and the columns that only they used."""
        index = torch.tensor(kept, device=self.mask.device)
        mask = self.mask[index]
        start = int(mask.any(dim=0).to(torch.int8).argmax())
        for layer in self.cache.layers:
            layer.keys = layer.keys[index, :, start:]
            layer.values = layer.values[index, :, start:]
        self.mask = mask[:, start:]
        self.rows = [self.rows[i] for i in kept]


class HFRollout:
    """See `RolloutEngine`. Raises ValueError naming the config key for settings that it cannot serve."""

    def __init__(self, settings: EngineSettings) -> None:
        if settings.tensor_parallel_size != 1:
            raise ValueError(
                f"actor_rollout_ref.rollout.tensor_model_parallel_size={settings.tensor_parallel_size} needs "
                "rollout.name=vllm; the hf engine runs on one rank"
            )
        self.settings = settings
        self.hf_config = settings.load_hf_config()
        self.device = torch.device(settings.device)
        self.can_sleep = self.device.type == "cuda" and settings.free_cache_engine
        with preserved_rng():
            model = AutoModelForCausalLM.from_config(
                self.hf_config, dtype=settings.dtype, trust_remote_code=settings.trust_remote_code
            )
        self._model = model.to(self.device).eval().requires_grad_(False)
        self._vocab_size = self.hf_config.get_text_config().vocab_size
        self._eos = frozenset(settings.eos_token_ids)
        self._waiting: deque[RolloutRequest] = deque()
        self._batch: _Batch | None = None
        self._totals = dict.fromkeys(
            ("generated_tokens", "prompt_tokens", "cached_prompt_tokens", "requests", "steps", "running_sum", "busy_s"),
            0.0,
        )

    # -- generation ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, new_requests: Sequence[RolloutRequest], max_steps: int) -> list[RolloutResult]:
        """Add `new_requests`, advance by at most `max_steps` engine steps, return what finished."""
        started = time.perf_counter()
        check_requests(new_requests, self.settings.max_model_len, self._vocab_size)
        for request in new_requests:
            _check_sampling(request.sampling)
        self._waiting.extend(new_requests)
        results: list[RolloutResult] = []
        for _ in range(max_steps):
            if not self.has_unfinished():
                break
            self._totals["steps"] += 1
            self._totals["running_sum"] += len(self._waiting) + (len(self._batch.rows) if self._batch else 0)
            bunch = self._next_bunch()
            results += self._prefill(bunch) if bunch else self._decode()
        self._totals["busy_s"] += time.perf_counter() - started
        return results

    def has_unfinished(self) -> bool:
        return bool(self._waiting) or self._batch is not None

    def abort_all(self) -> None:
        self._waiting.clear()
        self._batch = None

    @torch.inference_mode()
    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Log-probs at temperature 1 of tokens 1.. of each sequence given their prefix."""
        scores = []
        for sequence in sequences:
            tokens = torch.from_numpy(sequence.astype(np.int64)).to(self.device)
            log_probs = self._model(input_ids=tokens[None]).logits[0, :-1].float().log_softmax(-1)
            scores.append(log_probs.gather(-1, tokens[1:, None])[:, 0].cpu().numpy())
        return scores

    def stats(self) -> dict[str, float]:
        """Cumulative. `running_sum` / `steps` is the mean number of requests in the engine."""
        return dict(self._totals)

    def _next_bunch(self) -> list[RolloutRequest]:
        """Waiting requests that fit beside the running rows and within the token budget of one step, in their order."""
        room = self.settings.max_num_seqs - (len(self._batch.rows) if self._batch else 0)
        bunch: list[RolloutRequest] = []
        longest = 0
        while self._waiting and len(bunch) < room:
            longest = max(longest, len(self._waiting[0].prompt_ids))
            if bunch and longest * (len(bunch) + 1) > self.settings.max_num_batched_tokens:
                break
            bunch.append(self._waiting.popleft())
        return bunch

    def _prefill(self, bunch: list[RolloutRequest]) -> list[RolloutResult]:
        length = max(len(request.prompt_ids) for request in bunch)
        tokens = np.zeros((len(bunch), length), dtype=np.int64)
        mask = np.zeros_like(tokens)
        for row, request in enumerate(bunch):
            start = length - len(request.prompt_ids)
            tokens[row, start:], mask[row, start:] = request.prompt_ids, 1
        rows = [_Row(request, torch.Generator(self.device).manual_seed(request.seed % (1 << 63))) for request in bunch]
        batch = _Batch(rows, DynamicCache(), torch.from_numpy(mask).to(self.device))
        results = self._forward(batch, torch.from_numpy(tokens).to(self.device))
        if batch.rows and self._batch is not None:
            self._batch.join(batch)
        elif batch.rows:
            self._batch = batch
        return results

    def _decode(self) -> list[RolloutResult]:
        batch = self._batch
        assert batch is not None
        batch.mask = F.pad(batch.mask, (0, 1), value=1)
        tokens = torch.tensor([[row.tokens[-1]] for row in batch.rows], device=self.device)
        results = self._forward(batch, tokens)
        if not batch.rows:
            self._batch = None
        return results

    def _forward(self, batch: _Batch, tokens: torch.Tensor) -> list[RolloutResult]:
        """Run `tokens` (rows, new) through the model, sample one token a row, drop and return what finished."""
        positions = (batch.mask.cumsum(-1) - 1).clamp_(min=0)[:, -tokens.shape[1] :]
        logits = self._model(
            input_ids=tokens,
            attention_mask=batch.mask,
            position_ids=positions,
            past_key_values=batch.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        sampled, log_probs = sample(
            logits, [row.request.sampling for row in batch.rows], [row.generator for row in batch.rows]
        )
        results, kept = [], []
        for index, (row, token, log_prob) in enumerate(zip(batch.rows, sampled.tolist(), log_probs.tolist())):
            row.tokens.append(token)
            row.log_probs.append(log_prob)
            reason = self._finish_reason(row)
            if reason is None:
                kept.append(index)
            else:
                results.append(self._to_result(row, reason))
        if results:
            if kept:
                batch.keep(kept)
            else:
                batch.rows = []
        return results

    def _finish_reason(self, row: _Row) -> str | None:
        sampling = row.request.sampling
        if row.tokens[-1] in self._eos and not sampling.ignore_eos:
            return FINISH_STOP
        length = len(row.request.prompt_ids) + len(row.tokens)
        return (
            FINISH_LENGTH if len(row.tokens) >= sampling.max_tokens or length >= self.settings.max_model_len else None
        )

    def _to_result(self, row: _Row, reason: str) -> RolloutResult:
        self._totals["requests"] += 1
        self._totals["generated_tokens"] += len(row.tokens)
        self._totals["prompt_tokens"] += len(row.request.prompt_ids)
        return RolloutResult(
            request_id=row.request.request_id,
            response_ids=np.asarray(row.tokens, dtype=np.int32),
            log_probs=np.asarray(row.log_probs, dtype=np.float32),
            finish_reason=reason,
        )

    # -- weights and memory ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def load_weights(self, weights: NamedTensors) -> None:
        """Copy all weights in; every parameter must come, under its Hugging Face name."""
        assert not self.has_unfinished(), "weights must not change under running requests"
        targets = dict(self._model.named_parameters(remove_duplicate=False))
        missing = {name for name, _ in self._model.named_parameters()}
        for name, tensor in weights:
            assert name in targets, f"the model has no parameter {name}"
            targets[name].copy_(tensor)
            missing.discard(name)
        assert not missing, f"no weights came for {sorted(missing)[:3]}"

    def reset_prefix_cache(self) -> None:
        """Nothing is kept between requests."""

    def sleep(self, level: int = 2) -> None:
        """Forget running requests; on CUDA move the weights to host memory (either level)."""
        self.abort_all()
        if self.can_sleep:
            self._model.to("cpu")

    def wake_up(self, tags: list[str] | None = None) -> None:
        if self.can_sleep and (tags is None or "weights" in tags):
            self._model.to(self.device)


def sample(
    logits: torch.Tensor, settings: Sequence[SamplingSettings], generators: Sequence[torch.Generator]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row from logits (rows, vocabulary).

    Each row uses its own settings and generator: `argmax(p / e)` with e standard exponential draws from p. Returns
    tokens (rows,) int64 and their log-probs (rows,) float32 in the distribution drawn from; greedy rows report
    temperature 1.
    """
    logits = logits.float()
    temperature = torch.tensor([[s.temperature or 1.0] for s in settings], device=logits.device)
    log_probs = _keep_likeliest(logits / temperature, settings).log_softmax(-1)
    tokens = log_probs.argmax(-1)
    noise = torch.empty(logits.shape[-1], device=logits.device)
    for row, (setting, generator) in enumerate(zip(settings, generators)):
        if not setting.greedy:
            tokens[row] = (log_probs[row].exp() / noise.exponential_(generator=generator)).argmax()
    return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]


def _keep_likeliest(logits: torch.Tensor, settings: Sequence[SamplingSettings]) -> torch.Tensor:
    """Set logits outside each row's top-k and top-p to -inf; top-p is the smallest set that reaches the mass."""
    vocabulary = logits.shape[-1]
    top_k = [s.top_k if s.top_k > 0 and not s.greedy else vocabulary for s in settings]
    top_p = [1.0 if s.greedy else s.top_p for s in settings]
    if min(top_k) >= vocabulary and min(top_p) >= 1:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True)
    rank = torch.arange(vocabulary, device=logits.device)
    ordered = ordered.masked_fill(rank >= torch.tensor(top_k, device=logits.device)[:, None], -torch.inf)
    probabilities = ordered.softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    too_far = mass_before >= torch.tensor(top_p, device=logits.device)[:, None]
    too_far[:, 0] = False
    return torch.empty_like(logits).scatter_(-1, order, ordered.masked_fill(too_far, -torch.inf))


def _pad_left(tensor: torch.Tensor, length: int, dim: int) -> torch.Tensor:
    missing = length - tensor.shape[dim]
    if not missing:
        return tensor
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1 - dim) + (missing, 0))


def _check_sampling(sampling: SamplingSettings) -> None:
    if sampling.extra:
        raise ValueError(
            f"actor_rollout_ref.rollout.{min(sampling.extra)} is not known to rollout.name=hf; "
            "remove it or use rollout.name=vllm"
        )
