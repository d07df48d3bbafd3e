"""Checkpoints continue exactly, on any number of ranks; exports are plain Hugging Face folders."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.workers.ranks import run_ranks
from tests.workers.tiny import actor_config, random_rows, save_tiny_model
from verl.models.build import ModelSpec, build_model
from verl.models.lora import LoraSettings, adapters_off
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.checkpoint.hf_export import export_model, full_parameters
from verl.utils.fsdp_utils import ShardingOptions, create_device_mesh, ensure_process_group
from verl.utils.lr_schedule import cosine_factor, get_cosine_schedule_with_warmup
from verl.workers.actor import DataParallelPPOActor

LORA = LoraSettings(rank=4, alpha=8)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    ensure_process_group("cpu")
    return save_tiny_model(tmp_path_factory.mktemp("model"))


class _Run:
    """An actor with everything a checkpoint holds."""

    def __init__(
        self,
        path: str,
        lora: LoraSettings | None = None,
        contents: tuple[str, ...] = ("model", "optimizer", "extra"),
        **optim: Any,
    ):
        mesh = create_device_mesh(dist.get_world_size(), -1, "cpu")
        self.module = build_model(ModelSpec(path, lora=lora), mesh, ShardingOptions())
        # A large eps, so that gradients that are rounding noise are not blown up to full steps.
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, **{"lr": 1e-2, "eps": 1e-2, **optim})
        self.scheduler = get_cosine_schedule_with_warmup(self.optimizer, 1, 8)
        self.actor = DataParallelPPOActor(actor_config(), self.module, self.optimizer)
        self.files = FSDPCheckpointManager(
            self.module, self.optimizer, self.scheduler, contents=contents, lora=lora, base_path=path
        )

    def train(self, *seeds: int) -> _Run:
        for seed in seeds:
            rows = random_rows(8, seed)
            rows.batch["mini_batch"] = torch.arange(8) // 4
            share = range(dist.get_rank(), 8, dist.get_world_size())
            self.actor.update_policy(rows.select_idxs(list(share)))
            self.scheduler.step()
        return self

    def state(self) -> dict[str, torch.Tensor]:
        weights = {name: tensor.clone() for name, tensor in full_parameters(self.module)}
        return {**weights, "lr": torch.tensor(self.scheduler.get_last_lr()), "noise": torch.rand(3)}


def _save_then_continue(path: str, folder: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    run = _Run(path).train(0, 1)
    run.files.save_checkpoint(folder, global_step=2)
    return run.train(2, 3).state()


def _load_then_continue(path: str, folder: str) -> dict[str, torch.Tensor]:
    run = _Run(path)
    assert run.files.load_checkpoint(folder) == 2
    return run.train(2, 3).state()


def _two_rank_story(path: str, folder: str, folder_of_one: str) -> tuple[dict, dict, dict]:
    """A run that went on, the same run resumed, and a run resumed from what one rank wrote."""
    return (
        _save_then_continue(path, folder),
        _load_then_continue(path, folder),
        _load_then_continue(path, folder_of_one),
    )


def _equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def test_a_resumed_run_is_bitwise_the_run_that_went_on(model_path: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "global_step_2" / "actor")
    assert _equal(_save_then_continue(model_path, folder), _load_then_continue(model_path, folder))


def test_the_number_of_ranks_may_change(model_path: str, tmp_path: Path) -> None:
    folder, folder_of_one = (str(tmp_path / name / "global_step_2" / "actor") for name in ("two", "one"))
    went_on_alone = _save_then_continue(model_path, folder_of_one)
    ranks = run_ranks(_two_rank_story, 2, model_path, folder, folder_of_one)
    one_took_over = _load_then_continue(model_path, folder)
    for went_on, resumed, from_one in ranks:
        assert _equal(went_on, resumed)
        for name in went_on.keys() - {"noise"}:
            torch.testing.assert_close(one_took_over[name], went_on[name], atol=2e-4, rtol=0, msg=name)
            torch.testing.assert_close(from_one[name], went_on_alone[name], atol=2e-4, rtol=0, msg=name)


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "verl.utils.check" in r.name]


def test_a_changed_optimiser_setting_holds_after_a_resume(
    model_path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(tmp_path / "global_step_2" / "actor")
    _Run(model_path).train(0, 1).files.save_checkpoint(folder, global_step=2)
    changed = _Run(model_path, lr=3e-4, betas=(0.8, 0.95), weight_decay=0.1)
    unchanged = _Run(model_path)
    with caplog.at_level(logging.WARNING):
        unchanged.files.load_checkpoint(folder)
        assert not _said(caplog)
        changed.files.load_checkpoint(folder)
    assert _said(caplog) == [
        "optim.lr: 0.01 in the checkpoint, 0.0003 from now on; "
        "optim.betas: [0.9, 0.999] in the checkpoint, [0.8, 0.95] from now on; "
        "optim.weight_decay: 0.01 in the checkpoint, 0.1 from now on"
    ]
    caplog.clear()
    (tmp_path / "global_step_2" / "resolved_config.yaml").touch()  # which the driver compares
    _Run(model_path, lr=3e-4).files.load_checkpoint(folder)
    assert not _said(caplog)
    for step in (2, 3, 4):
        group = changed.optimizer.param_groups[0]
        assert group["lr"] == changed.scheduler.get_last_lr()[0] == 3e-4 * cosine_factor(step, 1, 8, 0.0, 0.5)
        assert (group["betas"], group["weight_decay"]) == ((0.8, 0.95), 0.1)
        changed.train(step)
    changed.files.save_checkpoint(str(tmp_path / "global_step_5" / "actor"), global_step=5)
    caplog.clear()
    again = _Run(model_path, lr=3e-4, betas=(0.8, 0.95), weight_decay=0.1)
    again.files.load_checkpoint(str(tmp_path / "global_step_5" / "actor"))
    assert not _said(caplog)
    assert again.scheduler.get_last_lr() == changed.scheduler.get_last_lr()


def test_old_checkpoints_go_and_a_save_leaves_nothing_half_done(model_path: str, tmp_path: Path) -> None:
    run = _Run(model_path)
    (tmp_path / "global_step_5" / "critic").mkdir(parents=True)
    for step in (5, 10, 15):
        run.files.save_checkpoint(str(tmp_path / f"global_step_{step}" / "actor"), None, step, 2)
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.glob("*/*")) == [
        "global_step_10/actor",
        "global_step_15/actor",
        "global_step_5/critic",
    ]
    assert not list(tmp_path.rglob("*.tmp"))


def test_mistakes_name_the_key(model_path: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="checkpoint.contents"):
        _Run(model_path, contents=("weights",))
    run = _Run(model_path)
    with pytest.raises(ValueError, match="trainer.resume_mode=disable"):
        run.files.load_checkpoint(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="default_hdfs_dir"):
        run.files.save_checkpoint(str(tmp_path / "a"), hdfs_path="hdfs://x")


@pytest.mark.parametrize("file", ["extra_state_rank_0.pt", "dist_ckpt/__0_0.distcp", "dist_ckpt/.metadata"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_damaged_checkpoint_is_refused(model_path: str, tmp_path: Path, file: str, damage: str) -> None:
    folder = tmp_path / "global_step_2" / "actor"
    _Run(model_path).train(0, 1).files.save_checkpoint(str(folder), global_step=2)
    path = folder / file
    content = path.read_bytes()
    path.unlink() if damage == "missing" else path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="trainer.resume_mode=disable") as caught:
        _Run(model_path).files.load_checkpoint(str(folder))
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_the_hugging_face_folder_is_the_model(tmp_path: Path, family: str) -> None:
    run = _Run(save_tiny_model(tmp_path / "base", family), contents=("model", "hf_model")).train(0)
    run.files.save_checkpoint(str(tmp_path / "global_step_1" / "actor"))
    folder = tmp_path / "global_step_1" / "actor" / "huggingface"
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(2, 12)[None]
    torch.testing.assert_close(loaded(ids).logits, run.module(ids).logits, atol=1e-5, rtol=1e-5)
    described = json.loads((folder / "config.json").read_text())
    assert described["architectures"] == [type(loaded).__name__]
    assert described["use_cache"] is True


def test_adapters_train_alone_and_the_reference_is_the_base(model_path: str, tmp_path: Path) -> None:
    run = _Run(model_path, lora=LORA)
    rows = random_rows(8)
    before, _ = run.actor.compute_log_prob(rows)
    base = {name: tensor.clone() for name, tensor in full_parameters(run.module) if "lora_" not in name}
    run.train(0, 1)
    after, _ = run.actor.compute_log_prob(rows)
    assert (after - before).abs().max() > 1e-4
    with adapters_off(run.module):
        torch.testing.assert_close(run.actor.compute_log_prob(rows)[0], before)
    for name, tensor in full_parameters(run.module):
        assert "lora_" in name or torch.equal(tensor, base[name])

    folder = tmp_path / "global_step_2" / "actor"
    run.files.save_checkpoint(str(folder), global_step=2)
    export_model(run.module, tmp_path / "merged")
    assert len({file.stat().st_mode for file in (tmp_path / "merged").iterdir()}) == 1
    resumed = _Run(model_path, lora=LORA)
    resumed.files.load_checkpoint(str(folder))
    assert _equal(run.train(2).state().copy() | {"noise": torch.zeros(1)}, resumed.train(2).state() | {"noise": torch.zeros(1)})

    ids = torch.arange(2, 12)[None]
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_path), folder / "lora_adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, atol=1e-4, rtol=1e-4)
