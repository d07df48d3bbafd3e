"""One optimiser step of an update under the profiler: which, and that it changes nothing, written or not."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.workers.ranks import run_ranks
from tests.workers.tiny import actor_config, random_rows, save_tiny_model
from verl.models.build import ModelSpec, build_model
from verl.utils.checkpoint.hf_export import full_parameters
from verl.utils.fsdp_utils import ShardingOptions, create_device_mesh, ensure_process_group
from verl.workers.actor import DataParallelPPOActor


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    ensure_process_group("cpu")
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def _updated(path: str, profile: Path | None, steps: int = 2, epochs: int = 1) -> dict[str, torch.Tensor]:
    """The weights after an update of ``steps`` mini-batches, gone through ``epochs`` times."""
    mesh = create_device_mesh(dist.get_world_size(), -1, "cpu")
    module = build_model(ModelSpec(path, seed=7), mesh, ShardingOptions())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    actor = DataParallelPPOActor(actor_config(ppo_epochs=epochs), module, optimizer)
    rows = random_rows(12)[dist.get_rank() :: dist.get_world_size()]
    rows.batch["mini_batch"] = torch.arange(len(rows)) % steps
    actor.profile_path = profile
    actor.update_policy(rows)
    assert len(actor.step_seconds) == steps * epochs and actor.profile_path is None
    return {name: tensor.clone() for name, tensor in full_parameters(module)}


@pytest.mark.parametrize(("steps", "epochs", "recorded"), [(1, 1, 1), (3, 1, 2), (1, 2, 2)])
def test_the_second_step_is_recorded_or_the_only_one(
    model_path: str, tmp_path: Path, steps: int, epochs: int, recorded: int
) -> None:
    _updated(model_path, tmp_path / "step.txt", steps, epochs)
    title = (tmp_path / "step.txt").read_text(encoding="utf-8").partition("\n")[0]
    of_an_update = f"optimiser step {recorded} of an update, rank 0: {12 // steps} rows, "
    figures = re.fullmatch(re.escape(of_an_update) + r"([\d,]+) tokens, (\d+) micro-batch\(es\)", title)
    assert figures and int(figures[1].replace(",", "")) >= 12 // steps and 1 <= int(figures[2]) <= 12 // steps
    assert (tmp_path / "step.json.gz").is_file()


def test_a_profile_that_cannot_be_written_is_a_warning(
    model_path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING, logger="verl.utils.profiling"):
        got = _updated(model_path, tmp_path / "file" / "step.txt")
    assert "could not be written" in caplog.text and str(tmp_path / "file") in caplog.text
    expected = _updated(model_path, None)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in got.items())


def _one_rank_cannot_write(path: str, folder: str) -> bool:
    blocked = Path(folder) / "file"
    blocked.touch()
    file = (blocked if dist.get_rank() == 1 else Path(folder)) / "step.txt"
    _updated(path, file)
    return file.is_file()


def test_a_rank_that_cannot_write_keeps_no_other_waiting(model_path: str, tmp_path: Path) -> None:
    assert run_ranks(_one_rank_cannot_write, 2, model_path, str(tmp_path)) == [True, False]
