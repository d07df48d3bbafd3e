"""Aggregation: the four modes by hand, and exactness however a mini-batch is cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.trainer.ppo.aggregation import AGGREGATION_MODES, LossNormalizer, agg_loss, token_and_row_counts

# Row sums 6 and 4; lengths 3 and 1.
LOSS = torch.tensor([[1.0, 2.0, 3.0, 100.0], [4.0, float("nan"), float("inf"), 7.0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 10 / 4),
        ("seq-mean-token-sum", (6 + 4) / 2),
        ("seq-mean-token-mean", (6 / 3 + 4 / 1) / 2),
        ("seq-mean-token-sum-norm", (6 + 4) / 4),
    ],
)
def test_modes_by_hand(mode: str, expected: float) -> None:
    assert agg_loss(LOSS, MASK, mode).item() == pytest.approx(expected)


def test_the_constant_of_sum_norm_can_be_given() -> None:
    assert agg_loss(LOSS, MASK, "seq-mean-token-sum-norm", response_length=20).item() == pytest.approx(0.5)


def test_unknown_mode_names_the_key() -> None:
    with pytest.raises(ValueError, match="actor.loss_agg_mode='mean'.*token-mean"):
        agg_loss(LOSS, MASK, "mean")


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_filler_rows_change_nothing(mode: str) -> None:
    filler_loss = torch.cat([LOSS, torch.full((3, 4), 9.0)])
    filler_mask = torch.cat([MASK, torch.zeros(3, 4, dtype=torch.long)])
    assert torch.equal(agg_loss(LOSS, MASK, mode), agg_loss(filler_loss, filler_mask, mode))


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_an_empty_batch_gives_zero(mode: str) -> None:
    assert agg_loss(LOSS, torch.zeros_like(MASK), mode).item() == 0.0


@given(data=st.data(), mode=st.sampled_from(AGGREGATION_MODES))
@settings(deadline=None, max_examples=60)
def test_pieces_add_up_to_the_whole(data: st.DataObject, mode: str) -> None:
    """However rows are cut into micro-batches and padded, pieces and their gradients add up to agg_loss of the whole."""
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
    width = max(max(lengths), 1)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    loss = torch.randn(len(lengths), width, generator=generator, dtype=torch.float64, requires_grad=True)
    mask = (torch.arange(width) < torch.tensor(lengths).unsqueeze(-1)).long()
    whole = agg_loss(loss, mask, mode, response_length=11)
    (expected_gradient,) = torch.autograd.grad(whole, loss)

    tokens, rows = token_and_row_counts(mask).tolist()
    normaliser = LossNormalizer(mode, tokens, rows, response_length=11)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(lengths)), max_size=4)))
    total = torch.zeros((), dtype=torch.float64)
    for begin, end in zip([0, *cuts], [*cuts, len(lengths)], strict=True):
        needed = max(int(mask[begin:end].sum(-1).max()) if end > begin else 0, 1)  # each piece at its own width
        total = total + normaliser(loss[begin:end, :needed], mask[begin:end, :needed])
    (gradient,) = torch.autograd.grad(total, loss)
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(gradient, expected_gradient)
