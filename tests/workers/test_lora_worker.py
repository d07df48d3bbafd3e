"""A worker with LoRA, in this process: adapters are what trains and what the engine gets merged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.workers.tiny import embedded_config, random_rows, save_tiny_model, save_tiny_tokenizer, tiny_config
from verl.models.lora import LoraSettings, add_lora
from verl.utils.checkpoint.hf_export import full_parameters
from verl.workers.fsdp_workers import ActorRolloutRefWorker


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    save_tiny_tokenizer(folder)
    return folder


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ("nonsense", "nonsense not found"),
        (("q_proj", "w_proj"), "no module is called w_proj"),
        (("q_proj", "lm_head"), "lm_head is no linear layer of the decoder"),
        (("embed_tokens",), "model.embed_tokens is no linear layer"),
        (("norm",), "norm is no linear layer|is not supported"),
        ("[q", "unterminated"),
    ],
)
@pytest.mark.parametrize(("head", "key"), [(None, "model.target_modules"), ("score", "critic.model.target_modules")])
def test_targets_that_could_not_learn_are_refused(targets, said: str, head: str | None, key: str) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config())
    with pytest.raises(ValueError, match=f"^{key}=.*({said}).*use all-linear, or .*k_proj.*q_proj"):
        add_lora(model, LoraSettings(rank=2, alpha=4.0, target_modules=targets, head=head))


@pytest.fixture(scope="module")
def worker(base: Path) -> ActorRolloutRefWorker:
    return start_worker(base)


def start_worker(folder: Path) -> ActorRolloutRefWorker:
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


def engine_log_probs(worker: ActorRolloutRefWorker, ids: np.ndarray) -> torch.Tensor:
    """What the engine says of tokens 1.. of ``ids`` in a rollout that begins now."""
    worker.begin_rollout()
    found = worker.engine.score([ids])[0]
    worker.end_rollout()
    return torch.from_numpy(np.asarray(found))


def test_peft_reads_the_adapters_and_a_resumed_run_starts_with_them(
    worker: ActorRolloutRefWorker, base: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    rows = random_rows(8, seed=1)
    rows.batch["ref_log_prob"] = worker.compute_ref_log_prob(rows).batch["ref_log_prob"]
    worker.update_actor(rows)
    learnt = worker.compute_log_prob(rows).batch["old_log_probs"]
    path = tmp_path / "global_step_1" / "actor"
    worker.save_checkpoint(str(path), None, 1)

    ids = np.arange(5, 25, dtype=np.int32)
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), path / "lora_adapter").eval()
    merged = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), path / "lora_adapter"
    ).merge_and_unload()
    exported = AutoModelForCausalLM.from_pretrained(path / "huggingface")
    plain = AutoModelForCausalLM.from_pretrained(base)

    def log_probs(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            said = torch.log_softmax(model(tokens).logits[0, :-1].float(), dim=-1)
        return said.gather(-1, tokens[0, 1:, None]).squeeze(-1)

    expected = log_probs(adapted)
    assert (expected - log_probs(plain)).abs().max() > 1e-3
    for model in (merged, exported):
        torch.testing.assert_close(log_probs(model), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(engine_log_probs(worker, ids), expected, atol=1e-3, rtol=1e-3)

    resumed = start_worker(base)  # a new run: the engine gets the adapters with its very first rollout
    resumed.load_checkpoint(str(path))
    torch.testing.assert_close(engine_log_probs(resumed, ids), expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(resumed.compute_log_prob(rows).batch["old_log_probs"], learnt, atol=0, rtol=0)
    torch.testing.assert_close(
        resumed.compute_ref_log_prob(rows).batch["ref_log_prob"], rows.batch["ref_log_prob"], atol=0, rtol=0
    )
