"""The driver says where the profile of a step is, if it was written."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.timing import StepTimer


@pytest.mark.parametrize(("step", "writable", "said"), [(2, True, True), (2, False, False), (3, True, False)])
def test_the_folder_of_a_profile_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, step: int, writable: bool, said: bool
) -> None:
    def update_actor(inputs: DataProto) -> DataProto:
        folder = inputs.meta_info.get("profile_dir")
        if folder is not None and writable:
            Path(folder).mkdir(parents=True)
        return DataProto(meta_info={"metrics": {"actor/lr": 1.0}})

    trainer = object.__new__(RayPPOTrainer)
    settings = SimpleNamespace(critic_warmup=0, profile_steps=[2])
    vars(trainer).update(
        global_steps=step, config=SimpleNamespace(trainer=settings), critic_wg=None, checkpoint_root=tmp_path,
        actor_rollout_wg=SimpleNamespace(update_actor=update_actor),
    )
    names = ("responses", "response_mask", "prompt_length", "mini_batch", "old_log_probs", "advantages")
    rows = DataProto.from_dict(tensors={name: torch.zeros(2, 1) for name in names})
    rows.non_tensor_batch["prompt_ids"] = rows.batch["responses"].numpy()
    rows.meta_info["global_token_num"] = [1, 1]
    metrics: dict[str, float] = {}
    with caplog.at_level(logging.INFO, logger="verl.trainer.ppo.ray_trainer"):
        trainer._update(rows, StepTimer("step", progress_bar=False), metrics)
    assert metrics == {"actor/lr": 1.0}
    line = f"profile of step 2's update: {tmp_path / 'profile' / 'step_2'}"
    assert [record.message for record in caplog.records] == ([line] if said else [])
