"""Gradients and the cosines between them, on a bigram model whose gradient has a closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.gradient_directions import (
    across,
    adam_step,
    advantage_terms,
    between,
    compare,
    cosine,
    gradients,
    halves,
    table,
)
from verl.protocol import DataProto
from verl.trainer.config import default_config
from verl.utils.row_arrays import object_array

VOCABULARY, TEMPERATURE = 5, 2.0
CONFIG = default_config("preset=embedded", f"actor_rollout_ref.rollout.temperature={TEMPERATURE}")
PARTS = [np.array([0, 1]), np.array([2, 3])]
ADVANTAGES = np.array([[2.0, -1.0, 0.5, -3.0], [1.0, 0.0, -2.0, 0.25]])


class Bigrams(nn.Module):
    """Logits of the next token are the row of the present one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1)))

    def forward(self, input_ids, predict_index, labels, temperature, **_):
        log_probs = (self.weight[input_ids[0, predict_index]] / temperature).log_softmax(-1)
        return log_probs.gather(1, labels[:, None])[:, 0], None


def make_rows() -> DataProto:
    """Four rows of two tasks with responses of 3, 1, 2 and 3 tokens."""
    lengths = torch.tensor([3, 1, 2, 3])
    mask = (torch.arange(3) < lengths[:, None]).long()
    responses = torch.tensor([[1, 2, 3], [4, 0, 0], [1, 1, 0], [2, 4, 3]])
    return DataProto.from_dict(
        tensors={
            "responses": responses,
            "response_mask": mask,
            "prompt_length": torch.tensor([2, 1, 1, 2]),
            "token_level_scores": torch.tensor([10.0, 0.0, 0.0, 10.0])[:, None] * (torch.arange(3) == 0),
            "step_rewards": torch.tensor([9.5, 0.0, 0.0, 10.0]),
        },
        non_tensors={
            "prompt_ids": object_array([np.array(ids, dtype=np.int32) for ids in ([3, 0], [2], [2], [1, 4])]),
            "anchor_obs": object_array(["home", "home", "home", "item"]),
            "uid": object_array(["a", "a", "b", "b"]),
            "traj_uid": object_array(["a0", "a1", "b0", "b1"]),
        },
    )  # fmt: skip


def by_hand(rows: DataProto, model: Bigrams, advantages: np.ndarray, members: np.ndarray) -> torch.Tensor:
    """-A (one-hot - softmax) / temperature in the row of the token before, over all 9 response tokens."""
    gradient = np.zeros((VOCABULARY, VOCABULARY))
    weight = model.weight.detach().double().numpy()
    for row in members:
        length = int(rows.batch["response_mask"][row].sum())
        ids = [*rows.non_tensor_batch["prompt_ids"][row], *rows.batch["responses"][row, :length].tolist()]
        for before, token in zip(ids[-length - 1 : -1], ids[-length:], strict=True):
            odds = np.exp(weight[before] / TEMPERATURE)
            gradient[before] -= advantages[row] * (np.eye(VOCABULARY)[token] - odds / odds.sum()) / TEMPERATURE / 9
    return torch.from_numpy(gradient.flatten())


def test_gradients_are_those_of_the_closed_form() -> None:
    rows, model = make_rows(), Bigrams()
    found = gradients(model, rows, ADVANTAGES, PARTS, CONFIG)
    assert found.shape == (2, 2, VOCABULARY**2)
    for part, members in enumerate(PARTS):
        for number, values in enumerate(ADVANTAGES):
            torch.testing.assert_close(found[part, number], by_hand(rows, model, values, members), atol=1e-6, rtol=0)


def test_gradients_are_linear_in_advantages_and_add_up_over_parts() -> None:
    rows, model = make_rows(), Bigrams()
    parts = gradients(model, rows, ADVANTAGES, PARTS, CONFIG)
    whole = gradients(model, rows, (ADVANTAGES[0] + 0.5 * ADVANTAGES[1])[None], [np.arange(4)], CONFIG)
    torch.testing.assert_close(whole[0, 0], parts[:, 0].sum(0) + 0.5 * parts[:, 1].sum(0), atol=1e-6, rtol=0)


def test_micro_batches_change_nothing() -> None:
    rows, model = make_rows(), Bigrams()
    small = default_config(
        "preset=embedded", f"actor_rollout_ref.rollout.temperature={TEMPERATURE}",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=5",
    )  # fmt: skip
    cut = gradients(model, rows, ADVANTAGES, PARTS, small)
    torch.testing.assert_close(cut, gradients(model, rows, ADVANTAGES, PARTS, CONFIG), atol=1e-6, rtol=0)


def test_advantage_terms_and_halves() -> None:
    rows = make_rows()
    episode, step = advantage_terms(rows, CONFIG)
    assert episode.tolist() == [5.0, -5.0, -5.0, 5.0]
    assert step.tolist() == [4.75, -4.75, 0.0, 0.0]  # task b's two rows are alone on their pages
    assert [part.tolist() for part in halves(["a", "b", "a", "c", "b"])] == [[0, 1, 2, 4], [3]]


def test_figures_of_known_gradients() -> None:
    # halves (1, 0) and (0, 1) of the episode term, both (1, 0) of the step term: GRPO (1, 1), GiGPO (3, 1)
    parts = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [1.0, 0.0]]], dtype=torch.float64)
    figures = compare(parts, clip=1.0)
    assert figures["cosine of episode and step term's gradients"] == pytest.approx(2**-0.5)
    assert figures["**cosine of GRPO's and GiGPO's gradients**"] == pytest.approx(4 / 20**0.5)
    assert figures["length of GiGPO's gradient / GRPO's"] == pytest.approx(5**0.5)
    assert figures["cosine of their first AdamW steps"] == pytest.approx(1.0)  # the signs agree
    assert figures["GiGPO on one half and on the other"] == pytest.approx(2**-0.5)  # (2, 0) and (1, 1)
    assert figures["GRPO on one half, GiGPO on the other"] == pytest.approx(2**-0.5 / 2)
    assert figures["across: on one half and on the other"] == 0.0


def test_adams_first_step_is_that_of_torch() -> None:
    gradient = torch.tensor([3.0, -4.0, 1e-8], dtype=torch.float64)
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    parameter.grad = gradient.clone()
    nn.utils.clip_grad_norm_([parameter], 1.0)
    torch.optim.AdamW([parameter], lr=1.0, weight_decay=0.0).step()
    torch.testing.assert_close(adam_step(gradient, 1.0), parameter.detach(), atol=1e-6, rtol=0)


def test_vectors() -> None:
    x, y = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    assert cosine(x, x + y) == pytest.approx(5**-0.5)
    assert cosine(x, 0 * x) == 0.0
    assert across(x + y, x).tolist() == [0.0, 2.0]
    assert between([x, y, -y], [x, y, x + y]) == pytest.approx([0.5 * 5**-0.5, 5**-0.5, -0.5])
    assert table([{"rows": 3.0, "a": 1.0}, {"rows": 5.0, "a": 2.0}]).splitlines()[2:] == [
        "| rows | 3 | 5 | 4 ± 1 |", "| a | 1.000 | 2.000 | 1.500 ± 0.500 |",
    ]  # fmt: skip
