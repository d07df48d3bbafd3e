"""``generate_sequences``: every prompt answered once, the call that scripts written for single-turn training make."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from verl.protocol import DataProto
from verl.utils.row_arrays import object_array
from verl.workers.rollout.base import RolloutEngine, RolloutRequest, RolloutResult, run_to_completion
from verl.workers.rollout.settings import sampling_settings

_SEED_SPACE = 2**31


def generate_rows(engine: RolloutEngine, data: DataProto, rollout: Any, pad_token_id: int) -> DataProto:
    """Responses to this rank's prompts.

    Args:
        engine: awake and with current weights.
        data: ``prompt_ids`` (or ``raw_prompt_ids``, or left-padded ``input_ids`` with ``attention_mask``);
            ``meta_info["validate"]`` takes the validation settings, ``meta_info["do_sample"] = False`` is greedy.
        rollout: ``actor_rollout_ref.rollout`` of the config.
        pad_token_id: fills responses up to the longest.

    Returns:
        ``responses``, ``response_mask`` int64 and ``rollout_log_probs`` float32, ``(N, R)`` with R the configured
        response length on every rank, ``prompt_length`` ``(N,)``; the prompts' non-tensor columns, ``prompt_ids`` and
        ``finish_reason``.
    """
    prompts = _prompts(data)
    results = _answer(engine, prompts, data, rollout)
    shape = (len(prompts), rollout.response_length)
    responses = torch.full(shape, pad_token_id, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.int64)
    log_probs = torch.zeros(shape)
    for row, result in enumerate(results):
        length = len(result.response_ids)
        responses[row, :length] = torch.from_numpy(np.asarray(result.response_ids, dtype=np.int64))
        mask[row, :length] = 1
        log_probs[row, :length] = torch.from_numpy(np.asarray(result.log_probs, dtype=np.float32))
    columns = dict(data.non_tensor_batch)
    columns["prompt_ids"] = object_array(prompts)
    columns["finish_reason"] = object_array([result.finish_reason for result in results])
    return DataProto.from_dict(
        tensors={
            "responses": responses,
            "response_mask": mask,
            "rollout_log_probs": log_probs,
            "prompt_length": torch.tensor([len(p) for p in prompts], dtype=torch.int64),
        },
        non_tensors=columns,
        meta_info=dict(data.meta_info),
    )


def _prompts(data: DataProto) -> list[np.ndarray]:
    for key in ("prompt_ids", "raw_prompt_ids"):
        if key in data.non_tensor_batch:
            return [np.asarray(ids, dtype=np.int32) for ids in data.non_tensor_batch[key]]
    ids, mask = data.batch["input_ids"].numpy(), data.batch["attention_mask"].numpy().astype(bool)
    return [row[keep].astype(np.int32) for row, keep in zip(ids, mask)]


def _answer(engine: RolloutEngine, prompts: list[np.ndarray], data: DataProto, rollout: Any) -> list[RolloutResult]:
    """Results in the order of ``prompts``. Ranks of a tensor-parallel replica run all prompts of the replica."""
    meta = data.meta_info
    sampling = sampling_settings(rollout, meta.get("validate", False), meta.get("do_sample", True))
    rank, size = dist.get_rank(), rollout.ranks_per_engine
    step = int(data.meta_info.get("global_steps", 0))
    requests = []
    for row, prompt in enumerate(prompts):
        seed = np.random.SeedSequence((rollout.seed, step, rank, row)).generate_state(1)[0] % _SEED_SPACE
        requests.append(RolloutRequest(f"{rank}-{row}", prompt, sampling, seed=int(seed)))
    gathered: list[list[RolloutRequest]] = [requests]
    if size > 1:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, requests)
        gathered = everyone[rank // size * size : rank // size * size + size]
    results = {r.request_id: r for r in run_to_completion(engine, [q for part in gathered for q in part])}
    return [results[request.request_id] for request in requests]
