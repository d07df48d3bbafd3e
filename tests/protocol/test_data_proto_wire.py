"""Rows through pickle, disk, Ray and collectives."""

import pickle

import numpy as np
import pytest
import ray
import torch
import torch.multiprocessing as mp

from verl.protocol import DataProto, DataProtoFuture, all_gather_data_proto
from verl.utils.net_utils import get_free_port
from verl.utils.row_arrays import object_array


def assert_same(left, right):
    assert set(left.batch.keys()) == set(right.batch.keys()) and left.batch.batch_size == right.batch.batch_size
    for key, tensor in left.batch.items():
        assert tensor.dtype == right.batch[key].dtype and torch.equal(tensor, right.batch[key])
    for key, column in left.non_tensor_batch.items():
        other = right.non_tensor_batch[key]
        assert column.dtype == other.dtype and column.shape == other.shape
        for a, b in zip(column, other, strict=True):
            assert type(a) is type(b)
            np.testing.assert_array_equal(a, b)
            assert getattr(a, "dtype", None) == getattr(b, "dtype", None)
    assert left.meta_info == right.meta_info


def make_rows():
    wide = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    return DataProto.from_dict(
        tensors={
            "half": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
            "ids": torch.arange(6).reshape(3, 2),
            "mask": torch.tensor([True, False, True]),
            "strided": wide[:3, ::2],
            "empty": torch.zeros(3, 0),
        },
        non_tensors={
            "ragged": object_array([np.arange(n, dtype=np.int32) for n in (3, 0, 5)]),
            "even": object_array([np.full((2, 2), n, dtype=np.uint8) for n in range(3)]),
            "mixed": object_array([np.arange(2), "text", {"k": 1}]),
            "numbers": np.array([0.5, np.nan, 2.0], dtype=np.float32),
        },
        meta_info={"temperature": 0.7},
    )


def test_pickle_keeps_types_and_shapes():
    rows = make_rows()
    assert_same(rows, pickle.loads(pickle.dumps(rows)))


def test_ragged_columns_and_tensors_travel_as_one_buffer_each():
    count = 500
    rows = DataProto.from_dict(
        {"x": torch.zeros(count, 64)}, {"prompt_ids": [np.zeros(100 + i % 7, dtype=np.int32) for i in range(count)]}
    )
    buffers = []
    body = pickle.dumps(rows, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 2  # the tensor and all prompts together
    assert len(body) < 15 * count  # what is left is the shapes
    assert_same(rows, pickle.loads(body, buffers=buffers))


def test_disk(tmp_path):
    rows = make_rows()
    rows.save_to_disk(tmp_path / "rows.pkl")
    assert_same(rows, DataProto.load_from_disk(tmp_path / "rows.pkl"))


def test_a_slice_pickles_its_own_rows_only():
    rows = DataProto.from_dict({"x": torch.zeros(1000, 1000)}, {"p": [np.zeros(1000)] * 1000})
    assert len(pickle.dumps(rows[:10])) < 200_000


def test_rows_out_of_ray_can_be_changed(ray_session):
    rows = make_rows()
    received = ray.get(ray.put(rows), timeout=60)
    assert_same(rows, received)
    received.batch["ids"] += 1  # shared memory is read-only; a row must not be
    received.non_tensor_batch["ragged"][0][0] = 7
    received.non_tensor_batch["numbers"][0] = 9.0
    assert received.batch["ids"][0, 0] == 1


def test_future_concatenates_cuts_and_checks(ray_session):
    rows = make_rows()
    future = DataProtoFuture.concat([ray.put(rows[:1]), ray.put(rows[1:])])
    assert_same(rows, future.get(timeout=60))
    assert [part.get(timeout=60).batch["ids"].tolist() for part in future.chunk(3)] == [[[0, 1]], [[2, 3]], [[4, 5]]]
    with pytest.raises(AssertionError, match="DataProto was expected"):
        DataProtoFuture.concat([ray.put(1)]).get(timeout=60)


def _gather(rank, world_size, port, folder):
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    rows = DataProto.from_dict(
        {"x": torch.full((2, 3), float(rank)), "y": torch.tensor([rank, rank])},
        {"ids": [np.arange(rank + 1), np.arange(rank + 1)], "name": [f"r{rank}a", f"r{rank}b"]},
    )
    all_gather_data_proto(rows, torch.distributed.group.WORLD)
    rows.save_to_disk(f"{folder}/{rank}.pkl")
    torch.distributed.destroy_process_group()


def test_all_gather_gives_every_rank_all_rows_in_rank_order(tmp_path):
    mp.spawn(_gather, args=(2, get_free_port(), str(tmp_path)), nprocs=2)
    for rank in range(2):
        rows = DataProto.load_from_disk(tmp_path / f"{rank}.pkl")
        assert rows.batch["y"].tolist() == [0, 0, 1, 1] and rows.batch["x"][:, 0].tolist() == [0, 0, 1, 1]
        assert rows.non_tensor_batch["name"].tolist() == ["r0a", "r0b", "r1a", "r1b"]
        assert [len(value) for value in rows.non_tensor_batch["ids"]] == [1, 1, 2, 2]
