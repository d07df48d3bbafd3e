"""vLLM in this process, as a rollout engine. The one file that knows how vLLM versions (0.25 to 0.33) differ.

The engine lives in the process that holds the training shard, so that weights pass without a copy through another
process. With tensor parallelism each rank builds its own engine under vLLM's `external_launcher`; all ranks of a
replica then make the same calls and stay in step because every decision of the scheduler is deterministic.

On CUDA vLLM schedules asynchronously: while the device computes a batch, the host prepares the next one, and a step
returns the tokens of the batch before. Nothing is left under way once no request is pending, so that weights may change
and memory may go.

Three rules follow from how vLLM behaves:
- every request carries its seed, since requests without one draw from the global generator;
- log-probs are `processed_logprobs`, else temperature, top-p and top-k would be left out of them;
- the engine is built once and kept until the process ends: shutting it down destroys the default process group.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from verl.utils.rng import preserved_rng
from verl.workers.rollout.base import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_STOP,
    NamedTensors,
    RolloutRequest,
    RolloutResult,
    SamplingSettings,
)
from verl.workers.rollout.cuda_graphs import graph_sizes
from verl.workers.rollout.model_fit import check_model, cpu_kv_cache_bytes, parallel_hint
from verl.workers.rollout.settings import EngineSettings, check_requests
from verl.workers.rollout.vllm_environment import import_vllm, prepare_environment, restored_environment

logger = logging.getLogger(__name__)

_KEY = "actor_rollout_ref.rollout"
_GRAPH_KEYS = {"cudagraph_capture_sizes", "max_cudagraph_capture_size", "compilation_config"}  # of engine_kwargs.vllm


class VLLMRollout:
    """See `RolloutEngine`. Build it after the process group and on every rank at the same time.

    Raises ValueError naming the config key if the model or the sizes do not fit.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.hf_config = settings.load_hf_config()
        check_model(self.hf_config, settings)
        prepare_environment(settings)
        self._on_cuda = settings.device != "cpu"
        self.can_sleep = self._on_cuda and settings.free_cache_engine
        if self._on_cuda and (not dist.is_initialized() or dist.get_rank() == 0):
            hint = parallel_hint(self.hf_config, settings, torch.cuda.mem_get_info()[1])
            if hint is not None:
                logger.warning(hint)
        with preserved_rng(), restored_environment():
            os.environ.update(import_vllm(settings.device))
            self._llm = _build_llm(settings, self.hf_config)
        self._engine = self._llm.llm_engine
        self._batches_ahead = self._engine.vllm_config.max_concurrent_batches - 1
        self._vocab_size = self.hf_config.get_text_config().vocab_size
        self._load_in_place = self._on_cuda and self._llm.apply_model(_weights_keep_their_layout)[0]
        self._pending: dict[str, int] = {}  # request id -> prompt length
        self._totals = dict.fromkeys(
            ("generated_tokens", "prompt_tokens", "cached_prompt_tokens", "requests", "steps", "running_sum", "busy_s"),
            0.0,
        )

    @property
    def llm(self) -> Any:
        """vLLM's own object, for what only it can do; requests of ours must not run meanwhile."""
        return self._llm

    # -- generation ------------------------------------------------------------------------------------------------

    def step(self, new_requests: Sequence[RolloutRequest], max_steps: int) -> list[RolloutResult]:
        """Add `new_requests`, advance by at most `max_steps` engine steps, return what finished."""
        started = time.perf_counter()
        check_requests(new_requests, self.settings.max_model_len, self._vocab_size)
        self._add(new_requests)
        results: list[RolloutResult] = []
        for _ in range(max_steps):
            if not self._pending:
                break
            self._totals["steps"] += 1
            self._totals["running_sum"] += len(self._pending)
            results.extend(self._to_result(output) for output in self._engine.step() if output.finished)
        if results and not self._pending:
            self._settle()
        self._totals["busy_s"] += time.perf_counter() - started
        return results

    def has_unfinished(self) -> bool:
        return bool(self._pending)

    def abort_all(self) -> None:
        if self._pending:
            self._engine.abort_request(list(self._pending))
            self._pending.clear()
            self._settle()

    def _settle(self) -> None:
        """Take in the batches that were prepared before the last request ended; nobody waits for their tokens."""
        if self._batches_ahead:
            for _ in range(self._batches_ahead + 1):  # one more tells the device which requests have ended
                self._engine.step()

    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Log-probs at temperature 1 of tokens 1.. given their prefix. Sequences must be shorter than `max_model_len`.

        The engine computes the logits of a whole sequence at once, so keep to a few hundred tokens each on a full GPU.
        """
        from vllm import SamplingParams, TokensPrompt

        assert not self._pending, "score() is for an idle engine"
        assert all(1 < len(sequence) < self.settings.max_model_len for sequence in sequences)
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        for index, sequence in enumerate(sequences):
            self._engine.add_request(f"score-{index}", TokensPrompt(prompt_token_ids=sequence.tolist()), params.clone())
        scores: dict[str, np.ndarray] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    tokens, entries = output.prompt_token_ids, output.prompt_logprobs
                    values = [entries[i][tokens[i]].logprob for i in range(1, len(tokens))]
                    scores[output.request_id] = np.asarray(values, dtype=np.float32)
        self._settle()
        return [scores[f"score-{index}"] for index in range(len(sequences))]

    def stats(self) -> dict[str, float]:
        """Cumulative. `running_sum` / `steps` is the mean number of requests in the engine."""
        return dict(self._totals)

    def _add(self, requests: Sequence[RolloutRequest]) -> None:
        from vllm import TokensPrompt

        params = [_sampling_params(r.sampling, r.seed, self.settings.eos_token_ids) for r in requests]
        added: list[str] = []
        try:
            for request, sampling_params in zip(requests, params):
                assert request.request_id not in self._pending, f"request {request.request_id} is already running"
                prompt = TokensPrompt(prompt_token_ids=request.prompt_ids.tolist())
                self._engine.add_request(request.request_id, prompt, sampling_params)
                added.append(request.request_id)
                self._pending[request.request_id] = len(request.prompt_ids)
        except BaseException:
            self._engine.abort_request(added)
            for request_id in added:
                del self._pending[request_id]
            raise

    def _to_result(self, output: Any) -> RolloutResult:
        completion = output.outputs[0]
        response_ids = np.asarray(completion.token_ids, dtype=np.int32)
        self._totals["requests"] += 1
        self._totals["generated_tokens"] += len(response_ids)
        self._totals["prompt_tokens"] += self._pending.pop(output.request_id)
        self._totals["cached_prompt_tokens"] += output.num_cached_tokens or 0
        reason = completion.finish_reason
        return RolloutResult(
            request_id=output.request_id,
            response_ids=response_ids,
            log_probs=_sampled_log_probs(completion),
            finish_reason=reason if reason in (FINISH_STOP, FINISH_LENGTH) else FINISH_ABORT,
        )

    # -- weights and memory ----------------------------------------------------------------------------------------

    def load_weights(self, weights: NamedTensors) -> None:
        """Take all weights, in model order, on every rank of the replica in lockstep.

        On CUDA an unquantised model takes them in place. Elsewhere (the CPU backend packs its matrices after loading,
        and so do quantised models) the layers go through vLLM's own reload. An error inside `weights` leaves a model
        that cannot run, so whoever yields them does everything that can fail beforehand.
        """
        assert not self._pending, "weights must not change under running requests"
        try:
            if self._load_in_place:
                self._llm.apply_model(lambda model: model.load_weights(weights))
            else:
                self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        except Exception as error:
            raise RuntimeError("the weights did not reach the vLLM engine; it cannot be used any more") from error
        self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        self._llm.reset_prefix_cache()

    def sleep(self, level: int = 2) -> None:
        """Give device memory back: level 1 keeps the weights in host memory, level 2 forgets them."""
        self.abort_all()
        if self.can_sleep or not self._on_cuda:  # on CPU vLLM only pauses its scheduler
            self._llm.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take device memory again: all, or tags of "weights" and "kv_cache"."""
        if self.can_sleep or not self._on_cuda:
            self._llm.wake_up(tags)


# -- building ----------------------------------------------------------------------------------------------------------


def _build_llm(settings: EngineSettings, config: PretrainedConfig) -> Any:
    from vllm import LLM

    kwargs: dict[str, Any] = {
        "model": settings.model_path,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "load_format": "dummy" if settings.load_format.startswith("dummy") else settings.load_format,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": max(settings.max_num_batched_tokens, settings.max_num_seqs),
        "enable_chunked_prefill": settings.enable_chunked_prefill,
        "enable_prefix_caching": True,
        "enforce_eager": settings.enforce_eager,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # no sampling default of the model overrides ours
        "skip_tokenizer_init": not _has_tokenizer(settings.model_path),
        "disable_log_stats": settings.disable_log_stats,
        "async_scheduling": settings.device != "cpu",  # a CPU has nothing to overlap
        "trust_remote_code": settings.trust_remote_code,
        "seed": settings.seed,
    }
    if settings.hf_overrides:
        kwargs["hf_overrides"] = dict(settings.hf_overrides)
    if settings.device == "cpu":
        kwargs["kv_cache_memory_bytes"] = cpu_kv_cache_bytes(config, settings)
        # A prompt in pieces makes vLLM turn back a request's generator, which torch's CPU generator cannot do.
        kwargs["enable_chunked_prefill"] = False
        kwargs["max_num_batched_tokens"] = max(kwargs["max_num_batched_tokens"], settings.max_model_len)
    else:
        kwargs["enable_sleep_mode"] = settings.free_cache_engine
        if not settings.enforce_eager and not _GRAPH_KEYS & set(settings.engine_kwargs):
            kwargs["cudagraph_capture_sizes"] = graph_sizes(kwargs["max_num_batched_tokens"], settings.requests)
        if settings.kv_cache_memory_mb is not None:
            kwargs["kv_cache_memory_bytes"] = settings.kv_cache_memory_mb << 20
    if dist.is_initialized():
        kwargs["tensor_parallel_size"] = settings.tensor_parallel_size
        kwargs["distributed_executor_backend"] = "external_launcher"
        os.environ["LOCAL_RANK"] = str(torch.cuda.current_device() if settings.device != "cpu" else dist.get_rank())
        if settings.tensor_parallel_size > 1 and settings.device == "cpu":
            _name_shared_memory_by_job()
        elif settings.tensor_parallel_size > torch.cuda.device_count():
            # vLLM's own all-reduce asks after the GPUs of the other ranks, which a process that is shown one GPU
            # cannot see; NCCL can do without.
            kwargs["disable_custom_all_reduce"] = True
    elif settings.tensor_parallel_size > 1:
        raise ValueError(
            f"{_KEY}.tensor_model_parallel_size={settings.tensor_parallel_size} needs as many ranks, here is 1"
        )
    kwargs.update(_known_engine_kwargs(settings.engine_kwargs))
    logger.info("building vLLM: %s", kwargs)
    return LLM(**kwargs)


def _has_tokenizer(model_path: str) -> bool:
    return any((Path(model_path) / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json"))


def _known_engine_kwargs(engine_kwargs: Any) -> dict[str, Any]:
    """`engine_kwargs.vllm.*`: what this vLLM version knows."""
    from vllm.engine.arg_utils import EngineArgs

    known = {entry.name for entry in dataclasses.fields(EngineArgs)}
    unknown = sorted(set(engine_kwargs) - known)
    if unknown:
        import vllm

        raise ValueError(f"{_KEY}.engine_kwargs.vllm.{unknown[0]} is not an engine argument of vLLM {vllm.__version__}")
    return dict(engine_kwargs)


def _name_shared_memory_by_job() -> None:
    """Give the shared memory of CPU tensor parallelism a name of this job.

    Under `external_launcher` vLLM names it the same in every job, so that a second job, or one after an unclean end,
    fails.
    """
    from vllm.distributed.device_communicators import cpu_communicator

    manager = getattr(cpu_communicator, "_CPUSHMDistributed", None)
    if manager is None or getattr(manager, "_named_by_job", False):
        return
    original = manager.make_group_name

    def make_group_name(communicator: Any) -> str:
        return f"p{os.environ['MASTER_PORT']}{original(communicator).replace('/', '_')}"

    manager.make_group_name = staticmethod(make_group_name)
    manager._named_by_job = True


def _weights_keep_their_layout(model: torch.nn.Module) -> bool:
    """True if every layer keeps its weights as the checkpoint has them, so that they can be written over in place."""
    plain = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
    methods = {
        type(module.quant_method).__name__ for module in model.modules() if getattr(module, "quant_method", None)
    }
    latent_attention = any("MLA" in type(module).__name__ for module in model.modules())
    return methods <= plain and not latent_attention


# -- requests and outputs ----------------------------------------------------------------------------------------------


def _sampling_params(sampling: SamplingSettings, seed: int, eos_token_ids: Sequence[int]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kwargs: dict[str, Any] = {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": None if sampling.ignore_eos else list(eos_token_ids),
        "seed": seed % (1 << 63),
        "logprobs": 0,
        "flat_logprobs": True,
        "detokenize": "stop" in sampling.extra,
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    unknown = sorted(set(sampling.extra) - set(SamplingParams.__struct_fields__))
    if unknown:
        raise ValueError(f"{_KEY}.{unknown[0]} is not a sampling parameter of vLLM")
    kwargs.update(sampling.extra)
    return SamplingParams(**kwargs)


def _sampled_log_probs(completion: Any) -> np.ndarray:
    """The sampled token's log-prob at each position, (response_length,) float32."""
    entries = completion.logprobs
    if hasattr(entries, "start_indices"):  # flat form; the sampled token is the first of its position
        return np.asarray(entries.logprobs, dtype=np.float32)[np.asarray(entries.start_indices, dtype=np.int64)]
    values = [entry[token].logprob for entry, token in zip(entries, completion.token_ids)]
    return np.asarray(values, dtype=np.float32)
