"""One-shot generation for a DataProto of prompts, on top of `RolloutEngine.step`: the reference API's `generate_sequences`.

The rollout loop does not come here; it feeds engines request by request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from verl.protocol import DataProto
from verl.utils.row_arrays import object_array
from verl.workers.rollout.base import RolloutEngine, RolloutRequest, RolloutResult, SamplingSettings, run_to_completion

_SEEDS_PER_RANK = 1 << 32


def generate_sequences(
    engine: RolloutEngine,
    prompts: DataProto,
    sampling: SamplingSettings,
    *,
    pad_token_id: int,
    seed: int = 0,
    tp_group: Any | None = None,
) -> DataProto:
    """Answer each prompt once.

    prompts: N rows with `prompt_ids` (ragged, see the record's description) or, as the reference has it, `input_ids` and
    `attention_mask` (N, P). A column `seed` gives each row its own seed; without it seeds count up from `seed`, apart on
    each rank. tp_group: the ranks that share the engine, when there are several; each brings its own rows, all rows run
    on the shared engine, and each gets its own back.

    Returns `responses`, `response_mask` (N, R) int64, `rollout_log_probs` (N, R) float32, `prompt_length` (N,) int64 with R
    = `sampling.max_tokens` (so that the parts of all ranks concatenate), and `prompt_ids`, `finish_reason` columns.
    """
    own = build_requests(prompts, sampling, seed)
    everyone = own
    if tp_group is not None and dist.get_world_size(tp_group) > 1:
        shares: list[list[RolloutRequest]] = [[] for _ in range(dist.get_world_size(tp_group))]
        dist.all_gather_object(shares, own, group=tp_group)
        everyone = [request for share in shares for request in share]
    results = {result.request_id: result for result in run_to_completion(engine, everyone)}
    ordered = [results[request.request_id] for request in own]
    tensors = pack_results(ordered, sampling.max_tokens, pad_token_id)
    tensors["prompt_length"] = torch.tensor([len(request.prompt_ids) for request in own], dtype=torch.int64)
    columns = {
        "prompt_ids": object_array(request.prompt_ids for request in own),
        "finish_reason": object_array(result.finish_reason for result in ordered),
    }
    meta = {"temperature": sampling.temperature, "pad_token_id": pad_token_id}
    return DataProto.from_dict(tensors=tensors, non_tensors=columns, meta_info={**prompts.meta_info, **meta})


def build_requests(prompts: DataProto, sampling: SamplingSettings, seed: int) -> list[RolloutRequest]:
    """One request a row; ids are unique over the ranks of the job."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if "prompt_ids" in prompts.non_tensor_batch:
        rows = [np.asarray(row, dtype=np.int32) for row in prompts.non_tensor_batch["prompt_ids"]]
    else:
        ids, mask = prompts.batch["input_ids"], prompts.batch["attention_mask"].bool()
        rows = [row[kept].cpu().numpy().astype(np.int32) for row, kept in zip(ids, mask)]
    seeds = prompts.non_tensor_batch.get("seed")
    if seeds is None:
        seeds = np.arange(len(rows)) + seed + rank * _SEEDS_PER_RANK
    return [
        RolloutRequest(f"generate-{rank}-{index}", row, sampling, int(seeds[index])) for index, row in enumerate(rows)
    ]


def pack_results(results: Sequence[RolloutResult], width: int, pad_token_id: int) -> dict[str, torch.Tensor]:
    """Right-pad to `width`: `responses`, `response_mask` (N, width) int64 and `rollout_log_probs` (N, width) float32."""
    responses = torch.full((len(results), width), pad_token_id, dtype=torch.int64)
    mask = torch.zeros(len(results), width, dtype=torch.int64)
    log_probs = torch.zeros(len(results), width, dtype=torch.float32)
    for row, result in enumerate(results):
        length = len(result.response_ids)
        responses[row, :length] = torch.from_numpy(result.response_ids.astype(np.int64))
        mask[row, :length] = 1
        log_probs[row, :length] = torch.from_numpy(result.log_probs)
    return {"responses": responses, "response_mask": mask, "rollout_log_probs": log_probs}
