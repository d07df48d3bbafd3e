"""A worker with LoRA, in this process: adapters are what trains and what the engine gets merged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.tiny import embedded_config, random_rows, save_tiny_model, save_tiny_tokenizer
from verl.utils.checkpoint.hf_export import full_parameters
from verl.workers.fsdp_workers import ActorRolloutRefWorker


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> ActorRolloutRefWorker:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    save_tiny_tokenizer(folder)
    config = embedded_config(
        f"actor_rollout_ref.model.path={folder}",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.optim.lr=0.05",
        "actor_rollout_ref.actor.checkpoint.contents=[model,optimizer,extra,hf_model]",
        "data.max_prompt_length=32",
        "data.max_response_length=9",
    )
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, "actor_rollout_ref", "cpu")
    worker.init_model(10)
    return worker


def test_the_reference_stays_and_the_engine_follows(worker: ActorRolloutRefWorker, tmp_path: Path) -> None:
    assert worker.reference is None
    rows = random_rows(8)
    reference = worker.compute_ref_log_prob(rows).batch["ref_log_prob"]
    frozen = {name: tensor.clone() for name, tensor in full_parameters(worker.module) if "lora_" not in name}
    for _ in range(3):
        rows.batch["ref_log_prob"] = reference
        assert worker.update_actor(rows).meta_info["metrics"]["actor/grad_norm"] > 0
    moved = worker.compute_log_prob(rows).batch["old_log_probs"]
    assert (moved - reference).abs().max() > 1e-3
    torch.testing.assert_close(worker.compute_ref_log_prob(rows).batch["ref_log_prob"], reference)
    assert all(torch.equal(frozen[n], t) for n, t in full_parameters(worker.module) if n in frozen)
    assert worker.probe()["rollout/probe_gap_mean"] < 1e-3

    path = tmp_path / "global_step_3" / "actor"
    worker.save_checkpoint(str(path), None, 3)
    assert (path / "lora_adapter" / "adapter_model.safetensors").is_file()
    assert (path / "huggingface" / "model.safetensors").is_file()
    worker.update_actor(rows)
    worker.load_checkpoint(str(path))
    torch.testing.assert_close(worker.compute_log_prob(rows).batch["old_log_probs"], moved, atol=0, rtol=0)
    assert worker.probe()["rollout/probe_gap_mean"] < 1e-3
    assert worker.memory()
