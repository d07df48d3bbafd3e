"""Two ranks on CPU with gloo: an FSDP2 trainer and a tensor-parallel engine, then two engines of one rank each."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.rollout import tiny
from verl.protocol import DataProto
from verl.utils.row_arrays import object_array
from verl.workers.one_shot import generate_rows
from verl.workers.rollout.base import run_to_completion
from verl.workers.sharding_manager import HybridEngine

pytest.importorskip("vllm")

STATE: dict[str, object] = {}


def build(folder: str, tensor_parallel: int) -> None:
    """FSDP2 over both ranks; engines of `tensor_parallel` ranks."""
    from verl.workers.rollout.vllm_rollout import VLLMRollout

    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    model = tiny.build_model(seed=1)
    for layer in model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model)
    engine = VLLMRollout(tiny.settings(folder, tensor_parallel_size=tensor_parallel))
    hybrid = HybridEngine(model, engine, device="cpu", dtype=torch.float32)
    STATE.update(model=model, engine=engine, hybrid=hybrid)


def take_a_step(learning_rate: float) -> None:
    """One AdamW step on the shards, so that the full weights exist nowhere but in the stream."""
    model, hybrid = STATE["model"], STATE["hybrid"]
    tokens = torch.arange(40).view(2, 20)
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=learning_rate).step()
    hybrid.mark_updated()


def full_copy() -> torch.nn.Module:
    """The trainer's weights in a plain model, gathered by another way than the stream."""
    copy = tiny.build_model()
    full = {name: tensor.full_tensor() for name, tensor in STATE["model"].state_dict().items()}
    copy.load_state_dict(full)
    return copy


def sync_and_roll_out(sampled: bool) -> list[list[int]]:
    engine, hybrid = STATE["engine"], STATE["hybrid"]
    hybrid.begin_rollout()
    copy = full_copy()
    gap = hybrid.verify(tiny.score_fn(copy))
    assert gap["rollout/probe_gap_max"] < 2e-4
    batch = tiny.requests(4, tiny.SAMPLED if sampled else tiny.GREEDY)
    torch.rand(3 * (dist.get_rank() + 1))  # ranks whose generators stand elsewhere must not diverge
    results = {result.request_id: result for result in run_to_completion(engine, batch, slice_steps=7)}
    if not sampled:
        for request in batch:
            assert results[request.request_id].response_ids.tolist() == tiny.greedy_tokens(copy, request.prompt_ids, 24)
    hybrid.end_rollout()
    return [results[request.request_id].response_ids.tolist() for request in batch]


def generate_own_rows() -> None:
    """Each rank of the replica brings its own prompts and gets its own answers from the shared engine."""
    hybrid = STATE["hybrid"]
    hybrid.begin_rollout()
    rows = [request.prompt_ids for request in tiny.requests(4, tiny.SAMPLED)][2 * dist.get_rank() :][:2]
    prompts = DataProto.from_dict(non_tensors={"prompt_ids": object_array(rows)})
    config = tiny.rollout_config(tensor_model_parallel_size=2, temperature=0.7, response_length=24)
    config.seed = 0
    data = generate_rows(STATE["engine"], prompts, config, 0)
    hybrid.end_rollout()
    copy = full_copy()
    for row, prompt in enumerate(rows):
        response = data.batch["responses"][row][data.batch["response_mask"][row].bool()].numpy()
        ours = tiny.log_probs_of(copy, prompt, response, 0.7)
        np.testing.assert_allclose(data.batch["rollout_log_probs"][row, : len(response)], ours, atol=1e-4)


def test_tensor_parallel_engine_with_a_sharded_trainer(tmp_path) -> None:
    folder = tiny.save_config(tmp_path)
    ranks = tiny.Ranks(2)
    try:
        ranks(build, folder, 2)
        before = ranks(sync_and_roll_out, False)
        assert before[0] == before[1]
        ranks(take_a_step, 0.05)
        after = ranks(sync_and_roll_out, False)
        assert after[0] == after[1] != before[0]
        sampled = ranks(sync_and_roll_out, True)
        assert sampled[0] == sampled[1]
        ranks(generate_own_rows)
    finally:
        ranks.close()


def test_one_engine_a_rank(tmp_path) -> None:
    ranks = tiny.Ranks(2)
    try:
        ranks(build, tiny.save_config(tmp_path), 1)
        ranks(take_a_step, 0.05)
        first, second = ranks(sync_and_roll_out, False)
        assert first == second
    finally:
        ranks.close()


def roll_out_share(tensor_parallel: int) -> dict[str, tuple[list[int], np.ndarray]]:
    """Tokens and log-probs of all requests, or of every second one where each rank has an engine."""
    hybrid = STATE["hybrid"]
    hybrid.begin_rollout()
    batch = tiny.requests(8, tiny.SAMPLED, first_seed=40)
    mine = batch if tensor_parallel == 2 else batch[dist.get_rank() :: 2]
    results = list(run_to_completion(STATE["engine"], mine, slice_steps=5))
    hybrid.end_rollout()
    return {result.request_id: (result.response_ids.tolist(), result.log_probs) for result in results}


@pytest.mark.slow
def test_tensor_and_data_parallel_engines_sample_the_same_for_the_same_seeds(tmp_path) -> None:
    folder = tiny.save_config(tmp_path)
    answers = []
    for tensor_parallel in (2, 1):
        ranks = tiny.Ranks(2)
        try:
            ranks(build, folder, tensor_parallel)
            ranks(take_a_step, 0.05)
            first, second = ranks(roll_out_share, tensor_parallel)
        finally:
            ranks.close()
        assert (set(first) == set(second)) is (tensor_parallel == 2)
        answers.append(first | second)
    together, apart = answers
    assert len(together) == 8 and set(together) == set(apart)
    for name, (tokens, log_probs) in together.items():
        assert apart[name][0] == tokens
        np.testing.assert_allclose(apart[name][1], log_probs, atol=1e-4)
