"""The critic's clipped squared error."""

from __future__ import annotations

import pytest
import torch

from verl.trainer.ppo.core_algos import compute_value_loss

PREDICTIONS = torch.tensor([[1.0, 2.0, 3.0]])
RETURNS = torch.tensor([[2.0, 2.0, 0.0]])
OLD_VALUES = torch.tensor([[0.2, 2.0, 3.2]])
MASK = torch.tensor([[1, 1, 0]])


def test_reference_figures() -> None:
    """Token 1: clip(1, -.3, .7) = .7, so max(1, 1.69); token 2: 0. Mean .845, no factor 1/2."""
    loss, clipfrac = compute_value_loss(PREDICTIONS, RETURNS, OLD_VALUES, MASK, cliprange_value=0.5)
    assert loss.item() == pytest.approx(0.845)
    assert clipfrac.item() == pytest.approx(0.5)


def test_a_clipped_prediction_has_no_gradient() -> None:
    predictions = PREDICTIONS.clone().requires_grad_(True)
    loss, _ = compute_value_loss(predictions, RETURNS, OLD_VALUES, MASK, cliprange_value=0.5)
    loss.backward()
    assert predictions.grad.tolist() == [[0.0, 0.0, 0.0]]
    predictions.grad = None
    loss, _ = compute_value_loss(predictions, RETURNS, OLD_VALUES, MASK, cliprange_value=100.0)
    loss.backward()
    assert predictions.grad.tolist() == [[-1.0, 0.0, 0.0]]  # 2 (1 - 2) / 2 tokens
