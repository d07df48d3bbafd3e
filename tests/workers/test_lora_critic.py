"""A critic with LoRA, in this process: adapters and value head train, and both are in what peft reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.tiny import embedded_config, random_rows, save_tiny_model, save_tiny_tokenizer
from verl.utils.checkpoint.hf_export import full_parameters
from verl.workers.fsdp_workers import CriticWorker


@pytest.mark.parametrize("targets", ["all-linear", "[q_proj,v_proj]"])
def test_adapters_and_head_learn_and_peft_reads_them(tmp_path: Path, targets: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForTokenClassification

    base = tmp_path / "model"
    save_tiny_model(base)
    save_tiny_tokenizer(base)
    config = embedded_config(
        f"critic.model.path={base}",
        f"critic.model.tokenizer_path={base}",
        "critic.model.lora_rank=4",
        f"critic.model.target_modules={targets}",
        "critic.optim.lr=0.02",
    )
    worker = CriticWorker(config.critic, "cpu")
    worker.init_model(10)
    before = {name: tensor.clone() for name, tensor in full_parameters(worker.module)}
    trained = {name for name, param in worker.module.named_parameters() if param.requires_grad}
    assert {"score.weight", "score.bias"} <= trained
    assert all("lora_" in name for name in trained - {"score.weight", "score.bias"})
    assert not any(name.startswith("score.lora_") for name in before)

    rows = random_rows(8)
    rows.batch["returns"] = rows.batch["response_mask"] * 3.0
    losses = []
    for _ in range(8):
        rows.batch["values"] = worker.compute_values(rows).batch["values"]
        losses.append(worker.update_critic(rows).meta_info["metrics"]["critic/vf_loss"])
    assert losses[-1] < 0.8 * losses[0]
    changed = {name for name, tensor in full_parameters(worker.module) if not torch.equal(tensor, before[name])}
    assert changed == trained

    path = tmp_path / "global_step_8" / "critic"
    worker.save_checkpoint(str(path), None, 8)
    learnt = worker.compute_values(rows).batch["values"]
    plain = AutoModelForTokenClassification.from_pretrained(base, num_labels=1)  # its head is random: the folder's wins
    restored = PeftModel.from_pretrained(plain, path / "lora_adapter").eval()
    row, count = 0, int(rows.batch["response_mask"][0].sum())
    prompt = torch.from_numpy(rows.non_tensor_batch["prompt_ids"][row]).long()
    ids = torch.cat([prompt, rows.batch["responses"][row, :count]])
    said = restored(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1, 0]
    torch.testing.assert_close(said, learnt[row, :count], atol=1e-4, rtol=1e-4)

    worker.update_critic(rows)
    worker.load_checkpoint(str(path))
    torch.testing.assert_close(worker.compute_values(rows).batch["values"], learnt, atol=0, rtol=0)
