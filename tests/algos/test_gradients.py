"""Gradients of the losses beside the plain ratio losses, against autograd of each formula written token by token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from algos_support import actor_config
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.trainer.ppo.aggregation import agg_loss
from verl.trainer.ppo.kl import kl_penalty
from verl.trainer.ppo.policy_loss import get_policy_loss_fn
from verl.trainer.ppo.value_loss import compute_value_loss

Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[tuple[int, int]]]
seeds = given(seed=st.integers(0, 10_000))
few = settings(deadline=None, max_examples=15)


def random_case(seed: int) -> Case:
    """Three tensors (4, 5) float64 with huge numbers where masked, the mask, and the valid cells."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (4,), generator=generator)
    mask = (torch.arange(5) < lengths.unsqueeze(-1)).long()
    tensors = [torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(3)]
    first, second, third = (torch.where(mask.bool(), tensor, 1e3) for tensor in tensors)
    cells = [(i, t) for i in range(4) for t in range(int(lengths[i]))]
    return first, second, third, mask, cells


def assert_same_gradient(variable: torch.Tensor, loss: torch.Tensor, plain: torch.Tensor) -> None:
    (found,) = torch.autograd.grad(loss, variable)
    (expected,) = torch.autograd.grad(plain, variable)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(found, expected)


def covariances(new: torch.Tensor, advantages: torch.Tensor, cells: list[tuple[int, int]]) -> list[float]:
    """(log_prob - mean)(A - mean), means over the valid tokens."""
    log_probs, values = [float(new[c].detach()) for c in cells], [float(advantages[c]) for c in cells]
    mean, mean_value = sum(log_probs) / len(cells), sum(values) / len(cells)
    return [(log_prob - mean) * (value - mean_value) for log_prob, value in zip(log_probs, values)]


@seeds
@few
def test_kl_cov(seed: int) -> None:
    """-A r, plus 0.7 |log r| on the half of the tokens whose covariance is highest."""
    old, step, advantages, mask, cells = random_case(seed)
    if len(cells) % 2:
        mask[cells[-1]] = 0
        cells = cells[:-1]  # an even number: half of it is a whole number of tokens
    new = (old + 0.3 * torch.where(mask.bool(), step, 0.0)).requires_grad_(True)
    config = actor_config(kl_cov_ratio=0.5, ppo_kl_coef=0.7)
    loss = agg_loss(get_policy_loss_fn("kl_cov")(old, new, advantages, mask, config).loss, mask, "token-mean")
    order = covariances(new, advantages, cells)
    top = sorted(range(len(cells)), key=lambda k: -order[k])[: len(cells) // 2]
    terms = [-advantages[c] * torch.exp(new[c] - old[c]) for c in cells]
    terms += [0.7 * (new[cells[k]] - old[cells[k]]).abs() for k in top]
    assert_same_gradient(new, loss, torch.stack(terms).sum() / len(cells))


@seeds
@few
def test_clip_cov(seed: int) -> None:
    """PPO clip without the tokens of positive covariance, when all of them are to go."""
    old, step, advantages, mask, cells = random_case(seed)
    new = (old + 0.3 * torch.where(mask.bool(), step, 0.0)).requires_grad_(True)
    config = actor_config(clip_cov_ratio=1.0, clip_cov_lb=0.0, clip_cov_ub=1e9)
    loss = agg_loss(get_policy_loss_fn("clip_cov")(old, new, advantages, mask, config).loss, mask, "token-mean")
    plain = new.sum() * 0.0
    for cell, covariance in zip(cells, covariances(new, advantages, cells)):
        if covariance <= 0:
            ratio = torch.exp(new[cell] - old[cell])
            clipped = torch.clamp(ratio, 1 - 0.2, 1 + 0.28)
            plain = plain + torch.max(-advantages[cell] * ratio, -advantages[cell] * clipped)
    assert_same_gradient(new, loss, plain / len(cells))


@seeds
@few
def test_value_loss(seed: int) -> None:
    """max((v - ret)^2, (clip(v, v_old - 0.5, v_old + 0.5) - ret)^2), mean over tokens."""
    values, returns, predictions, mask, cells = random_case(seed)
    predictions.requires_grad_(True)
    loss, _ = compute_value_loss(predictions, returns, values, mask, cliprange_value=0.5)
    plain = predictions.sum() * 0.0
    for cell in cells:
        clipped = torch.clamp(predictions[cell], float(values[cell]) - 0.5, float(values[cell]) + 0.5)
        plain = plain + torch.max((predictions[cell] - returns[cell]) ** 2, (clipped - returns[cell]) ** 2)
    assert_same_gradient(predictions, loss, plain / len(cells))


PLAIN_KL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "kl": lambda d: d,
    "abs": lambda d: d.abs(),
    "mse": lambda d: d**2 / 2,
    "low_var_kl": lambda d: torch.clamp(torch.exp(-d) + d - 1, -10, 10),
}


@pytest.mark.parametrize("name", sorted(PLAIN_KL))
@seeds
@few
def test_kl_in_the_loss(name: str, seed: int) -> None:
    new, reference, _, mask, cells = random_case(seed)
    new.requires_grad_(True)
    loss = agg_loss(kl_penalty(new, reference, name), mask, "token-mean")
    plain = torch.stack([PLAIN_KL[name](new[cell] - reference[cell]) for cell in cells]).mean()
    assert_same_gradient(new, loss, plain)
