"""One process, two uses of the device: the training shard and the rollout engine.

    train → begin_rollout: wake the engine's weights, stream parameters into them, wake its KV cache
          → roll out
          → end_rollout: the engine sleeps → train

Weights travel only when they changed or the engine forgot them. After a sync `verify` asks both sides for the
log-probs of the same tokens; they must agree within rounding. On CPU the same calls run, and sleeping frees nothing.

The engine's pool lies outside torch's allocator, so blocks that torch keeps for later stand in its way. They are handed
back before the engine wakes only if the device has too little without them: to free and to take them again costs time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from verl.utils.rng import get_rng_state, set_rng_state
from verl.workers.device_state import release_cached
from verl.workers.host_copies import synchronize
from verl.workers.memory_ledger import memory_ledger
from verl.workers.rollout.base import RolloutEngine, RolloutRequest, SamplingSettings, run_to_completion
from verl.workers.sharding_manager.weight_stream import plan_weights, stream_weights

logger = logging.getLogger(__name__)

ScoreFn = Callable[[list[np.ndarray]], list[np.ndarray]]
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.08}  # mean gap of log-probs, nats
_SYNC_SLACK = 10.0  # tolerances; beyond them the probe of a running training stops it
_PROBE_ROWS, _PROBE_PROMPT, _PROBE_RESPONSE = 4, 16, 48
_SPARE_BYTES = 4 << 30  # left free beside what the engine takes: its activations, communication buffers
_PROBE_VOCABULARY = 2048  # prompts take lower token ids: rows at the end may belong to no token and hold anything


class HybridEngine:
    """Moves weights and device memory between `actor_module` and `engine`.

    actor_module: FSDP2 or plain module, with or without LoRA adapters. dtype: of the engine's weights. device: where
    the engine computes. tolerance: largest mean log-prob gap that `verify` accepts (None: by dtype). All methods are
    to be called on all ranks together.
    """

    def __init__(
        self,
        actor_module: nn.Module,
        engine: RolloutEngine,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        tolerance: float | None = None,
    ) -> None:
        self.module = actor_module
        self.engine = engine
        self.device = torch.device(device)
        self.dtype = dtype
        self.tolerance = _TOLERANCE[dtype] if tolerance is None else tolerance
        self._version = 0
        self._engine_version = -1  # of the weights in the engine; -1: none
        self._trainer_rng: dict[str, Any] | None = None
        self._probe: tuple[list[np.ndarray], list[int]] | None = None  # sequences, and where their answers begin
        release_cached(self.device)
        free = _free_bytes(self.device)
        self._sleep()
        self._engine_bytes = _free_bytes(self.device) - free  # what the engine will take again

    @property
    def rolling_out(self) -> bool:
        return self._trainer_rng is not None

    def mark_updated(self) -> None:
        """The actor's weights changed (an optimiser step, a loaded checkpoint)."""
        assert not self.rolling_out, "weights must not change during a rollout"
        self._version += 1

    def begin_rollout(self) -> dict[str, float]:
        """Give the engine its memory and the current weights.

        Returns seconds, `timing_rollout_s/weight_sync` of the whole call and `.../load_weights` and
        `.../wake_kv_cache` of parts of it, `perf/weight_sync/tensors` (0 if nothing had to travel) and the memory
        ledger before and after.
        """
        assert not self.rolling_out, "begin_rollout called twice"
        started = time.perf_counter()
        self._trainer_rng = get_rng_state()
        metrics = memory_ledger(self.device, "before_rollout")
        plan = plan_weights(self.module) if self._engine_version != self._version else []
        stream = stream_weights(plan, self.dtype, self.device)
        self._make_room(self._engine_bytes)
        free = _free_bytes(self.device)
        self.engine.wake_up(["weights"])
        still_asleep = self._engine_bytes - (free - _free_bytes(self.device))
        loading = time.perf_counter()
        if plan:
            self._engine_version = -1
            self.engine.load_weights(stream)
            self._engine_version = self._version
            synchronize(self.device)  # so that the seconds are those of the copies too
        waking = time.perf_counter()
        self._make_room(still_asleep)
        self.engine.wake_up(["kv_cache"])
        metrics["timing_rollout_s/load_weights"] = waking - loading
        metrics["timing_rollout_s/wake_kv_cache"] = time.perf_counter() - waking
        if plan:
            self.engine.reset_prefix_cache()
        metrics.update(memory_ledger(self.device, "rollout"))
        metrics["perf/weight_sync/tensors"] = float(len(plan))
        metrics["timing_rollout_s/weight_sync"] = time.perf_counter() - started
        return metrics

    def end_rollout(self) -> dict[str, float]:
        """Take the memory back for training. Returns `timing_rollout_s/engine_sleep` and the memory ledger after."""
        assert self.rolling_out, "end_rollout without begin_rollout"
        started = time.perf_counter()
        self._sleep()
        set_rng_state(self._trainer_rng)
        self._trainer_rng = None
        metrics = memory_ledger(self.device, "after_rollout")
        metrics["timing_rollout_s/engine_sleep"] = time.perf_counter() - started
        return metrics

    def verify(self, score_fn: ScoreFn, sequences: Sequence[np.ndarray] | None = None) -> dict[str, float]:
        """Compare the trainer's log-probs with the engine's, between begin_rollout and end_rollout.

        score_fn: token id arrays to arrays of the log-probs, at temperature 1, of tokens 1.. given their prefix.
        sequences: what to score, every token but the first; None lets the engine answer a few random prompts and
        compares the tokens it sampled, both as sampled and as scored. The prompts' own tokens are left out: nothing
        that random is ever sampled, and the log-prob of an unlikely token is a difference of large logits, which
        bfloat16 rounds by tenths. Returns `rollout/probe_gap_mean` and `..._max` in nats, the largest over ranks.
        Raises RuntimeError on all ranks if the mean gap is beyond the tolerance on one.
        """
        if sequences is not None:
            return self._compare(score_fn, sequences, [1] * len(sequences))
        prompts, responses, sampled = self._sample_probe()
        self._probe = ([np.concatenate(pair) for pair in zip(prompts, responses)], [len(row) for row in prompts])
        return self._compare(score_fn, *self._probe, sampled=sampled)

    def verify_sync(self, score_fn: ScoreFn) -> dict[str, float]:
        """`verify` as it is cheap enough for every sync: both sides score the answers that the first call sampled.

        Training moves the weights to where rounding may be larger than at the start, so only a gap far beyond the
        tolerance raises.
        """
        if self._probe is None:
            return self.verify(score_fn)
        return self._compare(score_fn, *self._probe, slack=_SYNC_SLACK)

    def _compare(
        self,
        score_fn: ScoreFn,
        sequences: Sequence[np.ndarray],
        starts: Sequence[int],
        sampled: Sequence[np.ndarray] = (),
        slack: float = 1.0,
    ) -> dict[str, float]:
        """Gaps at the tokens of every sequence from its `starts` on; `sampled`: log-probs that came with them."""
        assert self.rolling_out, "the probe needs begin_rollout"
        trainer = [row[start - 1 :] for row, start in zip(score_fn(list(sequences)), starts)]
        engine = [row[start - 1 :] for row, start in zip(self.engine.score(sequences), starts)]
        gaps = [ours - theirs for ours, theirs in zip(trainer, engine)]
        gaps += [ours - theirs for ours, theirs in zip(trainer, sampled)]
        gap = np.abs(np.concatenate(gaps))
        mean, largest = self._largest_over_ranks(float(gap.mean()), float(gap.max()))
        if not mean <= slack * self.tolerance:  # also catches NaN
            raise RuntimeError(_advice(mean, largest, slack * self.tolerance, self.dtype))
        logger.debug("log-probs of trainer and engine differ by %.2g on average, %.2g at most", mean, largest)
        return {"rollout/probe_gap_mean": mean, "rollout/probe_gap_max": largest}

    def _sample_probe(self) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
        """Prompts, answers and the log-probs that came with the answers; the same on every rank of a replica."""
        assert self.rolling_out, "the probe needs begin_rollout"
        config, limit = self.engine.hf_config, self.engine.settings.max_model_len
        prompt_length = max(1, min(_PROBE_PROMPT, limit // 4))
        sampling = SamplingSettings(
            temperature=1.0, max_tokens=min(_PROBE_RESPONSE, limit - prompt_length - 1), ignore_eos=True
        )
        draw = np.random.default_rng(0)
        shape = (_PROBE_ROWS, prompt_length)
        vocabulary = min(config.get_text_config().vocab_size, _PROBE_VOCABULARY)
        prompts = list(draw.integers(vocabulary, size=shape, dtype=np.int32))
        requests = [RolloutRequest(f"probe-{i}", prompt, sampling, seed=i) for i, prompt in enumerate(prompts)]
        results = {result.request_id: result for result in run_to_completion(self.engine, requests)}
        ordered = [results[request.request_id] for request in requests]
        return prompts, [result.response_ids for result in ordered], [result.log_probs for result in ordered]

    def _largest_over_ranks(self, *values: float) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float32).nan_to_num(nan=float("inf")).to(self.device)
        if dist.is_initialized():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    def _sleep(self) -> None:
        self.engine.sleep(2)
        if self.engine.can_sleep:
            self._engine_version = -1
            release_cached(self.device)

    def _make_room(self, needed: int) -> None:
        """Before the engine takes `needed` bytes of device memory; nothing to do for one that never gave any back."""
        if self.engine.can_sleep and _free_bytes(self.device) < needed + _SPARE_BYTES:
            release_cached(self.device)


def _free_bytes(device: torch.device) -> int:
    """What the driver could give; 0 where nothing sleeps."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _advice(mean: float, largest: float, tolerance: float, dtype: torch.dtype) -> str:
    return (
        f"trainer and rollout engine disagree: mean log-prob gap {mean:.3g} (largest {largest:.3g}), accepted "
        f"{tolerance:.3g}. The engine runs in {str(dtype).removeprefix('torch.')}. Either weights did not arrive whole "
        "(a model whose parameter names differ between transformers and vLLM, or an untied head that is tied in "
        "config.json), or the two run different code for this model: actor_rollout_ref.rollout.dtype=float32 or "
        "rollout.name=hf tell which. If the gap is rounding that you accept, raise "
        "actor_rollout_ref.rollout.probe_tolerance."
    )
