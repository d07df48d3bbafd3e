"""A reference takes its weights from the policy that was just loaded instead of reading the folder again."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.workers.ranks import run_ranks
from tests.workers.tiny import embedded_config, save_tiny_model, save_tiny_tokenizer
from verl.models import build
from verl.utils.checkpoint.hf_export import full_parameters
from verl.utils.fsdp_utils import ensure_process_group
from verl.workers.fsdp_workers import ActorRolloutRefWorker

FP32, BF16, FP16 = "fp32", "bf16", "fp16"


def _worker(folder: Path, policy: str, reference: str, *overrides: str) -> ActorRolloutRefWorker:
    """A worker with policy and reference of these dtypes; the engine is not built."""
    key = "actor_rollout_ref"
    config = embedded_config(
        f"{key}.model.path={folder}",
        f"{key}.actor.fsdp_config.model_dtype={policy}",
        f"{key}.ref.fsdp_config.model_dtype={reference}",
        "data.max_prompt_length=32",
        "data.max_response_length=9",
        *overrides,
    )
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, "actor_rollout_ref", "cpu")
    with mock.patch.object(worker, "_build_engine"):
        worker.init_model(10)
    return worker


def _folder(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path)
    save_tiny_tokenizer(tmp_path)
    return tmp_path


def _reference_of_two_ranks(folder: Path) -> tuple[int, list[str]]:
    """How often the folder was read, and names of weights that differ from those that are read."""
    with mock.patch.object(build, "_build_source", wraps=build._build_source) as read:
        copied = _worker(folder, FP32, BF16)
        times = read.call_count
        with mock.patch.object(ActorRolloutRefWorker, "_policy_to_copy", lambda self: None):
            expected = _worker(folder, FP32, BF16)
    theirs = dict(full_parameters(expected.reference.actor_module))
    ours = dict(full_parameters(copied.reference.actor_module))
    assert ours.keys() == theirs.keys() and all(tensor.dtype == torch.bfloat16 for tensor in ours.values())
    return times, [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]


def test_the_folder_is_read_once_for_both(tmp_path: Path) -> None:
    assert run_ranks(_reference_of_two_ranks, 2, _folder(tmp_path)) == [(1, []), (0, [])]


def test_training_moves_the_policy_alone(tmp_path: Path) -> None:
    ensure_process_group("cpu")
    worker = _worker(_folder(tmp_path), FP32, FP32)
    before = {name: tensor.clone() for name, tensor in full_parameters(worker.reference.actor_module)}
    with torch.no_grad():
        for parameter in worker.module.parameters():
            parameter.add_(1)
    after = dict(full_parameters(worker.reference.actor_module))
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("policy", "reference", "overrides"),
    [
        (BF16, FP32, ()),
        (BF16, FP16, ()),
        (FP16, BF16, ()),
        (FP32, FP32, ("actor_rollout_ref.ref.fsdp_config.fsdp_size=1",)),
    ],
)
def test_what_the_policy_does_not_hold_is_read(
    tmp_path: Path, policy: str, reference: str, overrides: tuple[str, ...]
) -> None:
    ensure_process_group("cpu")
    folder = _folder(tmp_path / "model")
    with mock.patch.object(build, "_build_source", wraps=build._build_source) as read:
        worker = _worker(folder, policy, reference, *overrides)
    assert read.call_count == 2
    exact = _worker(folder, FP32, FP32).module
    theirs = dict(full_parameters(exact))
    for name, tensor in full_parameters(worker.reference.actor_module):
        assert torch.equal(tensor, theirs[name].to(tensor.dtype)), name
