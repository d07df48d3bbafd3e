"""The rollout loop with a scripted policy on real Ray actors."""

from __future__ import annotations

import numpy as np
import pytest
from support import EOS, ByteTokenizer, make_config, policy, shell, shopper, toy_manager

from agent_system.multi_turn_rollout import TrajectoryCollector
from agent_system.multi_turn_rollout.lock_step import LockStepAdapter

pytestmark = pytest.mark.usefixtures("local_ray")


def roll_out(config, client, envs, is_train=True, **meta):
    collector = TrajectoryCollector(config, ByteTokenizer())
    rows = config.data.train_batch_size if is_train else config.data.val_batch_size
    return collector.multi_turn_loop(shell(rows, global_steps=3, **meta), client, envs, is_train)


def test_first():
    config = make_config()
    rows = roll_out(config, policy(shopper), toy_manager(config))
    print(rows.meta_info["rollout_metrics"])
    print(rows)
