"""Every estimator with every loss learns a small task: two states, four actions, one right action in each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from algos_support import actor_config, algorithm_config, objects

from gigpo.core_gigpo import compute_step_discounted_returns
from verl.protocol import DataProto
from verl.trainer.ppo.advantage import AdvantageEstimator, compute_advantage
from verl.trainer.ppo.aggregation import LossNormalizer, token_and_row_counts
from verl.trainer.ppo.policy_loss import get_policy_loss_fn, policy_loss_names

TASKS, MEMBERS, STATES, ACTIONS = 4, 8, 2, 4
RIGHT = (1, 3)  # the right action in each state


def play(logits: torch.Tensor, generator: torch.Generator) -> tuple[DataProto, torch.Tensor]:
    """A rollout: each episode visits both states once and is paid 1 per right action. Rows, and the actions taken."""
    episodes = TASKS * MEMBERS
    probabilities = logits.detach().softmax(-1)
    actions = torch.stack(
        [torch.multinomial(probabilities[s], episodes, replacement=True, generator=generator) for s in range(STATES)], 1
    )  # (episodes, states)
    paid = (actions == torch.tensor(RIGHT)).float()
    greedy = (logits.argmax(-1) == torch.tensor(RIGHT)).float().sum()
    rows = episodes * STATES
    data = DataProto.from_dict(
        tensors={
            "token_level_rewards": paid.sum(1, keepdim=True).repeat_interleave(STATES, 0),  # the episode's on every row
            "token_level_scores": paid.sum(1, keepdim=True).repeat_interleave(STATES, 0),
            "response_mask": torch.ones(rows, 1, dtype=torch.long),
            "values": torch.zeros(rows, 1),
            "reward_baselines": greedy.repeat(rows),
        },
        non_tensors={
            "uid": objects(f"task{e // MEMBERS}" for e in range(episodes) for _ in range(STATES)),
            "traj_uid": objects(f"trajectory{e}" for e in range(episodes) for _ in range(STATES)),
            "step_index": np.tile(np.arange(STATES), episodes),
            "anchor_obs": objects(f"state{s}" for _ in range(episodes) for s in range(STATES)),
            "rewards": paid.flatten().numpy(),
        },
    )
    data.batch["step_rewards"] = compute_step_discounted_returns(data, 0.95)
    return data, actions.flatten()


def chance_of_right(logits: torch.Tensor) -> float:
    """Mean probability of the right action."""
    return float(logits.detach().softmax(-1)[torch.arange(STATES), torch.tensor(RIGHT)].mean())


@pytest.mark.parametrize("loss_name", policy_loss_names())
@pytest.mark.parametrize("estimator", [member.value for member in AdvantageEstimator])
def test_estimator_and_loss_learn(estimator: str, loss_name: str) -> None:
    if loss_name not in ("vanilla", "gspo", "cispo", "clip_cov", "kl_cov", "gpg"):
        pytest.skip("registered by another test")
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(STATES, ACTIONS, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.3)
    states = torch.arange(STATES).repeat(TASKS * MEMBERS)
    loss_fn = get_policy_loss_fn(loss_name)
    # Among rows, the two best of a group are steps of the same episode, and pass@k sees no lead.
    config = algorithm_config(estimator, gamma=0.95, compute_mean_std_cross_steps=estimator != "grpo_passk")
    for _ in range(15):
        data, actions = play(logits, generator)
        data = compute_advantage(data, config)
        mask, advantages = data.batch["response_mask"], data.batch["advantages"]
        old = logits.detach().log_softmax(-1)[states, actions].unsqueeze(-1)
        normaliser = LossNormalizer("token-mean", *token_and_row_counts(mask).tolist(), response_length=1)
        for _ in range(2):  # the second pass is off-policy, so that clips matter
            optimizer.zero_grad()
            for rows in torch.arange(len(mask)).split(40):
                new = logits.log_softmax(-1)[states[rows], actions[rows]].unsqueeze(-1)
                output = loss_fn(old[rows], new, advantages[rows], mask[rows], actor_config())
                normaliser(output.loss, mask[rows], output.agg_mode_override).backward()
            optimizer.step()
    assert chance_of_right(logits) > 0.5  # it starts at 0.25
