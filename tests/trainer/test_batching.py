"""Laying out rows over mini-batches and ranks."""
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.protocol import DataProto
from verl.trainer.ppo.batching import (
    FILLER_UID,
    arrange_rows,
    balance_metrics,
    concat_rows,
    row_lengths,
    without_filler,
)


def make_rows(prompts: list[int], responses: list[int]) -> DataProto:
    count, longest = len(prompts), max(responses)
    mask = torch.zeros(count, longest, dtype=torch.int64)
    for i, length in enumerate(responses):
        mask[i, :length] = 1
    ids = np.empty(count, dtype=object)
    for i, length in enumerate(prompts):
        ids[i] = np.arange(length, dtype=np.int32)
    return DataProto.from_dict(
        tensors={"responses": mask * 7, "response_mask": mask, "prompt_length": torch.tensor(prompts)},
        non_tensors={
            "prompt_ids": ids,
            "uid": np.array([f"g{i // 2}" for i in range(count)], dtype=object),
            "traj_uid": np.array([f"t{i}" for i in range(count)], dtype=object),
        },
    )


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 9)), min_size=1, max_size=40),
    mini=st.integers(1, 12),
    world=st.integers(1, 4),
    balance=st.booleans(),
)
def test_every_row_goes_to_one_rank_and_one_mini_batch(lengths, mini, world, balance):
    rows = make_rows([p for p, _ in lengths], [r for _, r in lengths])
    arranged = arrange_rows(rows, mini_batch_size=mini, world_size=world, pad_token_id=0, seed=3, balance=balance)
    names = arranged.non_tensor_batch["traj_uid"]
    assert sorted(name for name in names if name != FILLER_UID) == sorted(f"t{i}" for i in range(len(lengths)))
    chunks = [chunk.batch["mini_batch"] for chunk in arranged.chunk(world)]
    for chunk in chunks:
        assert torch.equal(chunk, chunks[0]), "ranks disagree on the mini-batches"
        assert torch.equal(chunk, chunk.sort().values)
    real = arranged.non_tensor_batch["uid"] != FILLER_UID
    sizes = np.bincount(arranged.batch["mini_batch"].numpy()[real])
    assert len(sizes) == -(-len(lengths) // mini)
    assert sizes.max() <= mini and sizes.max() - sizes.min() <= 1
    assert len(without_filler(arranged)) == len(lengths)


def test_filler_rows_weigh_nothing():
    arranged = arrange_rows(make_rows([3, 4, 5], [2, 2, 1]), mini_batch_size=2, world_size=2, pad_token_id=9, seed=0)
    filler = arranged.non_tensor_batch["uid"] == FILLER_UID
    assert filler.sum() == 1
    assert arranged.batch["response_mask"][torch.from_numpy(filler)].sum() == 0
    assert (arranged.batch["responses"][torch.from_numpy(filler)] == 9).all()


def test_token_sums_are_balanced_inside_a_mini_batch():
    rows = make_rows([100, 90, 20, 10], [1, 1, 1, 1])
    arranged = arrange_rows(rows, mini_batch_size=4, world_size=2, pad_token_id=0, seed=0)
    sums = row_lengths(arranged).reshape(2, -1).sum(1)
    assert sorted(sums.tolist()) == [112, 112]  # 101 + 11 and 91 + 21
    metrics = balance_metrics(row_lengths(rows), arranged, 2)
    assert metrics["global_seqlen/max"] == 192 and metrics["global_seqlen/balanced_max"] == 112


def test_no_rows_is_an_error_that_says_why():
    rows = make_rows([1], [1]).select_idxs(np.array([], dtype=np.int64))
    with pytest.raises(ValueError, match="every episode failed"):
        arrange_rows(rows, mini_batch_size=2, world_size=1, pad_token_id=0, seed=0)


def test_concat_pads_to_the_longest_response():
    joined = concat_rows([make_rows([2], [3]), make_rows([2], [5])])
    assert joined.batch["response_mask"].sum(-1).tolist() == [3, 5]
