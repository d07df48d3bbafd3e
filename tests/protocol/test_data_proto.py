"""The rows: construction, reading, changing, splitting, and the module's functions."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from verl import DataProto
from verl.protocol import (
    DataProtoConfig,
    DataProtoItem,
    collate_fn,
    fold_batch_dim,
    list_of_dict_to_dict_of_list,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)


def make_rows(count=4, **meta_info):
    """`a` (count, 2) and two columns; the elements of `ids` are equally long, which NumPy would make a matrix of."""
    return DataProto.from_dict(
        tensors={"a": torch.arange(2 * count).reshape(count, 2), "b": torch.arange(count).float()},
        non_tensors={
            "ids": [np.array([i, i + 10], dtype=np.int32) for i in range(count)],
            "uid": np.array([f"u{i}" for i in range(count)], dtype=object),
        },
        meta_info=meta_info,
    )


def ids(rows):
    assert rows.non_tensor_batch["ids"].ndim == 1 and rows.non_tensor_batch["ids"].dtype == object
    return [value.tolist() for value in rows.non_tensor_batch["ids"]]


def uids(rows):
    return rows.non_tensor_batch["uid"].tolist()


def test_from_dict_makes_object_columns_also_for_equally_long_elements():
    given = {"ids": [np.array([1, 2]), np.array([3, 4])], "names": ["x", "y"]}
    rows = DataProto.from_dict(tensors={"a": torch.zeros(2, 3)}, non_tensors=given)
    assert rows.non_tensor_batch["ids"].shape == (2,) and rows.non_tensor_batch["ids"].dtype == object
    assert given["names"].tolist() == ["x", "y"]  # the caller's dictionary is converted as well
    assert len(rows) == 2 and rows.batch.batch_size == (2,)


def test_construction_checks_lengths_types_and_dimensions():
    with pytest.raises(AssertionError, match="starts with"):
        DataProto.from_dict(tensors={"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(AssertionError, match="has 2 rows"):
        DataProto.from_dict(tensors={"a": torch.zeros(2)}, non_tensors={"x": np.zeros(3)})
    with pytest.raises(AssertionError, match="not a np.ndarray"):
        DataProto(batch=None, non_tensor_batch={"x": [1, 2]})
    with pytest.raises(AssertionError, match="one batch dimension"):
        DataProto(batch=TensorDict({"a": torch.zeros(2, 3)}, batch_size=(2, 3)))
    with pytest.raises(AssertionError, match="num_batch_dims"):
        DataProto.from_dict(tensors={"a": torch.zeros(2)}, num_batch_dims=0)
    with pytest.raises(AssertionError, match="one batch dimension"):
        DataProto.from_dict(tensors={"a": torch.zeros(2, 2)}, non_tensors={"x": np.zeros(2)}, num_batch_dims=2)
    with pytest.raises(ValueError, match="'x' is a list"):
        DataProto.from_single_dict({"a": torch.zeros(2), "x": [1, 2]})


def test_from_single_dict_splits_by_type_and_subclasses_stay():
    class Rows(DataProto):
        pass

    rows = Rows.from_single_dict({"a": torch.zeros(2), "x": np.array([1, 2])}, meta_info={"k": 1}, auto_padding=True)
    assert list(rows.batch.keys()) == ["a"] and list(rows.non_tensor_batch) == ["x"] and rows.meta_info["k"] == 1
    assert rows.is_padding_enabled()
    for derived in (rows[0:1], rows[[0]], rows.select(), rows.chunk(2)[0], rows.repeat(), Rows.concat([rows, rows])):
        assert type(derived) is Rows


def test_length_without_tensors_and_without_anything():
    assert len(DataProto.from_dict(non_tensors={"x": ["a", "b", "c"]})) == 3
    assert len(DataProto()) == 0
    assert len(DataProto(batch=None, non_tensor_batch=None)) == 0


def test_indexing():
    rows = make_rows(4, temperature=0.5)
    item = rows[np.int64(1)]
    assert isinstance(item, DataProtoItem) and item.batch["a"].tolist() == [2, 3]
    assert item.non_tensor_batch["ids"].tolist() == [1, 11] and item.meta_info is rows.meta_info
    assert rows[-1].non_tensor_batch["uid"] == "u3"
    assert uids(rows[1:3]) == ["u1", "u2"] and uids(rows[::2]) == ["u0", "u2"]
    for index in (
        [0, -1],
        np.array([0, 3]),
        torch.tensor([0, 3]),
        [True, False, False, True],
        torch.tensor([1, 0, 0, 1]).bool(),
    ):
        picked = rows[index]
        assert uids(picked) == ["u0", "u3"] and ids(picked) == [[0, 10], [3, 13]]
        assert picked.batch["b"].tolist() == [0.0, 3.0] and picked.meta_info is rows.meta_info
    assert len(rows[[]]) == 0
    with pytest.raises(TypeError):
        rows["a"]


def test_select_and_pop():
    rows = make_rows(3, t=1, k=2)
    part = rows.select(batch_keys=["a"], non_tensor_batch_keys=["uid", "missing"], meta_info_keys=["t", "missing"])
    assert list(part.batch.keys()) == ["a"] and list(part.non_tensor_batch) == ["uid"] and part.meta_info == {"t": 1}
    with pytest.raises(KeyError):
        rows.select(batch_keys=["missing"])
    copied = rows.select(deepcopy=True)
    copied.non_tensor_batch["ids"][0][0] = 99
    assert rows.non_tensor_batch["ids"][0][0] == 0

    popped = rows.pop(batch_keys=["a"], non_tensor_batch_keys=["uid"], meta_info_keys=["k"])
    assert list(popped.batch.keys()) == ["a"] and list(rows.batch.keys()) == ["b"]
    assert list(popped.non_tensor_batch) == ["uid"] and list(rows.non_tensor_batch) == ["ids"]
    assert popped.meta_info == {"k": 2} and rows.meta_info == {"t": 1}
    with pytest.raises(AssertionError, match="cannot pop"):
        rows.pop(batch_keys=["b", "a"])
    assert "b" in rows.batch.keys()  # nothing was taken by the call that failed


def test_rename():
    rows = make_rows(2)
    assert rows.rename("a", "x") is rows and set(rows.batch.keys()) == {"x", "b"}
    rows.rename(["x", "b"], ["a", "c"])
    assert set(rows.batch.keys()) == {"a", "c"} and rows.batch["a"].tolist() == [[0, 1], [2, 3]]
    rows.rename(["a", "c"], ["c", "a"])
    assert rows.batch["c"].tolist() == [[0, 1], [2, 3]] and rows.batch["a"].tolist() == [0, 1]
    with pytest.raises(ValueError):
        rows.rename(["a"], ["x", "y"])
    with pytest.raises(TypeError):
        rows.rename(("a",), "x")


def test_union_adds_and_compares():
    rows = make_rows(2, t=1)
    other = DataProto.from_dict(
        {"a": rows.batch["a"].clone(), "c": torch.ones(2)},
        {"x": ["p", "q"], "uid": np.array(["u0", "u1"], dtype=object)},
        {"t": 1, "s": 2},
    )
    assert rows.union(other) is rows
    assert set(rows.batch.keys()) == {"a", "b", "c"} and rows.meta_info == {"t": 1, "s": 2}
    for clash in (
        DataProto.from_dict({"a": torch.zeros(2, 2)}),
        DataProto.from_dict({"d": torch.zeros(2)}, {"uid": ["u0", "u9"]}),
        DataProto.from_dict({"d": torch.zeros(2)}, meta_info={"t": 5}),
        DataProto.from_dict({"d": torch.zeros(3)}),
    ):
        with pytest.raises(AssertionError):
            make_rows(2, t=1).union(clash)


def test_union_numpy_dict_compares_in_depth_and_nan_equals_nan():
    ragged = np.array([np.array([1.0, np.nan]), np.array([2.0])], dtype=object)
    same = np.array([np.array([1.0, np.nan]), np.array([2.0])], dtype=object)
    other = np.array([np.array([1.0, np.nan]), np.array([3.0])], dtype=object)
    assert union_numpy_dict({"x": ragged}, {"x": same})["x"] is same
    with pytest.raises(AssertionError):
        union_numpy_dict({"x": ragged}, {"x": other})
    numbers = np.array([[1.0, np.nan], [2.0, 3.0]])
    assert set(union_numpy_dict({"n": numbers}, {"n": numbers.copy(), "m": numbers})) == {"n", "m"}
    with pytest.raises(AssertionError):
        union_numpy_dict({"n": numbers}, {"n": numbers + 1})
    with pytest.raises(AssertionError):
        union_numpy_dict({"n": np.array([1, 2])}, {"n": np.array([1.0, 2.0])})
    dicts = np.array([{"a": float("nan")}, [1, "x"]], dtype=object)
    union_numpy_dict({"d": dicts}, {"d": np.array([{"a": float("nan")}, [1, "x"]], dtype=object)})


def test_union_tensor_dict():
    left = TensorDict({"a": torch.tensor([1, 2])}, batch_size=(2,))
    merged = union_tensor_dict(left, TensorDict({"a": torch.tensor([1, 2]), "b": torch.zeros(2)}, batch_size=(2,)))
    assert merged is left and set(merged.keys()) == {"a", "b"}
    with pytest.raises(AssertionError):
        union_tensor_dict(left, TensorDict({"a": torch.tensor([1, 3])}, batch_size=(2,)))
    with pytest.raises(AssertionError):
        union_tensor_dict(left, TensorDict({"c": torch.zeros(3)}, batch_size=(3,)))


def test_reorder_and_repeat_and_sample_level_repeat():
    rows = make_rows(3)
    rows.reorder(torch.tensor([2, 0, 1]))
    assert uids(rows) == ["u2", "u0", "u1"] and rows.batch["b"].tolist() == [2, 0, 1] and ids(rows)[0] == [2, 12]
    rows = make_rows(2)
    assert uids(rows.repeat(2, interleave=True)) == ["u0", "u0", "u1", "u1"]
    tiled = rows.repeat(2, interleave=False)
    assert uids(tiled) == ["u0", "u1", "u0", "u1"] and tiled.batch["b"].tolist() == [0, 1, 0, 1]
    assert ids(tiled) == [[0, 10], [1, 11]] * 2
    for counts in ([1, 3], (1, 3), torch.tensor([1, 3]), np.array([1, 3])):
        repeated = rows.sample_level_repeat(counts)
        assert uids(repeated) == ["u0", "u1", "u1", "u1"] and repeated.batch["b"].tolist() == [0, 1, 1, 1]
    with pytest.raises(AssertionError):
        rows.sample_level_repeat(torch.tensor([[1, 3]]))
    with pytest.raises(AssertionError):
        rows.sample_level_repeat([1])


def test_chunk_and_concat_are_inverse():
    rows = make_rows(4, t=1)
    parts = rows.chunk(2)
    assert [len(part) for part in parts] == [2, 2] and all(part.meta_info is rows.meta_info for part in parts)
    joined = DataProto.concat(parts)
    assert ids(joined) == ids(rows) and torch.equal(joined.batch["a"], rows.batch["a"]) and joined.meta_info == {"t": 1}
    with pytest.raises(AssertionError, match="divide"):
        rows.chunk(3)
    with pytest.raises(IndexError):
        DataProto.concat([])
    columns_only = DataProto.concat([DataProto.from_dict(non_tensors={"x": ["a"]})] * 2)
    assert columns_only.batch is None and columns_only.non_tensor_batch["x"].tolist() == ["a", "a"]


def test_chunk_with_padding_enabled_cuts_like_torch():
    rows = make_rows(5)
    rows.meta_info["_verl_auto_padding"] = True
    assert [len(part) for part in rows.chunk(2)] == [3, 2] == [len(t) for t in torch.arange(5).chunk(2)]
    with pytest.raises(AssertionError, match="make 3 parts"):
        rows.chunk(4)  # parts of two rows: three parts


def test_padding_repeats_the_last_or_first_row():
    rows = make_rows(2)
    rows.padding(2)
    assert uids(rows) == ["u0", "u1", "u1", "u1"] and rows.batch["b"].tolist() == [0, 1, 1, 1]
    rows = make_rows(2)
    rows.padding(1, "first")
    assert uids(rows) == ["u0", "u1", "u0"]


def test_padding_can_be_enabled_for_all(monkeypatch):
    rows = make_rows(2)
    assert not rows.is_padding_enabled()
    monkeypatch.setenv("VERL_AUTO_PADDING", "1")
    assert rows.is_padding_enabled() and DataProtoConfig.auto_padding
    monkeypatch.delenv("VERL_AUTO_PADDING")
    DataProtoConfig.auto_padding = True
    try:
        assert rows.is_padding_enabled()
    finally:
        DataProtoConfig.auto_padding = False
    with pytest.raises(AssertionError):
        DataProtoConfig.auto_padding = 1


def test_pad_to_divisor_takes_rows_in_turn():
    rows = make_rows(3)
    padded, pad_size = pad_dataproto_to_divisor(rows, 7)
    assert pad_size == 4 and uids(padded) == [f"u{i}" for i in (0, 1, 2, 0, 1, 2, 0)]
    assert uids(unpad_dataproto(padded, pad_size)) == uids(rows)
    assert pad_dataproto_to_divisor(rows, 3) == (rows, 0) and unpad_dataproto(rows, 0) is rows
    empty = DataProto()
    assert pad_dataproto_to_divisor(empty, 2) == (empty, 0)


def test_mini_batches():
    rows = make_rows(4, t=1)
    order = [uids(part) for part in rows.make_iterator(2, epochs=2)]
    assert order == [["u0", "u1"], ["u2", "u3"]] * 2

    def shuffled(seed):
        parts = list(rows.make_iterator(2, epochs=2, seed=seed, dataloader_kwargs={"shuffle": True}))
        assert all(part.meta_info is rows.meta_info and len(part) == 2 for part in parts)
        for part in parts:  # a row stays a row
            assert [f"u{int(b)}" for b in part.batch["b"]] == uids(part)
        return [uid for part in parts for uid in uids(part)]

    assert shuffled(1) == shuffled(1) and len({tuple(shuffled(seed)) for seed in range(5)}) > 1
    assert sorted(shuffled(3)[:4]) == ["u0", "u1", "u2", "u3"]
    with pytest.raises(AssertionError, match="mini_batch_size=3"):
        rows.make_iterator(3, epochs=1)


def test_collate_stacks_rows():
    rows = make_rows(3)
    joined = collate_fn([rows[2], rows[0]])
    assert joined.batch["a"].tolist() == [[4, 5], [0, 1]] and ids(joined) == [[2, 12], [0, 10]]


def test_fold_and_unfold():
    rows = make_rows(4)
    folded = fold_batch_dim(rows, 2)
    assert folded.batch["a"].shape == (2, 2, 2) and folded.non_tensor_batch["uid"].tolist() == [
        ["u0", "u1"],
        ["u2", "u3"],
    ]
    back = unfold_batch_dim(folded, batch_dims=2)
    assert torch.equal(back.batch["a"], rows.batch["a"]) and ids(back) == ids(rows) and len(back) == 4
    with pytest.raises(AssertionError):
        fold_batch_dim(rows, 3)


def test_unfold_column_chunks():
    rows = DataProto.from_dict(
        {
            "x": torch.tensor([[1, 1, 2, 2], [3, 3, 4, 4]]),
            "y": torch.tensor([[1, 2], [3, 4]]),
            "z": torch.tensor([7, 8]),
        },
        {"label": ["p", "q"]},
    )
    chosen = rows.unfold_column_chunks(2, split_keys=["x"])
    assert chosen.batch["x"].tolist() == [[1, 1], [2, 2], [3, 3], [4, 4]]
    assert chosen.batch["y"].tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]] and chosen.batch["z"].tolist() == [7, 7, 8, 8]
    assert chosen.non_tensor_batch["label"].tolist() == ["p", "p", "q", "q"]
    everything = rows.unfold_column_chunks(2)
    assert everything.batch["y"].tolist() == [[1], [2], [3], [4]] and everything.batch["z"].tolist() == [7, 7, 8, 8]
    with pytest.raises(AssertionError, match="is not cut by 3"):
        rows.unfold_column_chunks(3, split_keys=["x"])


def test_list_of_dicts():
    assert list_of_dict_to_dict_of_list([{"a": 1, "b": 2}, {"a": 3, "b": 4}]) == {"a": [1, 3], "b": [2, 4]}
    assert list_of_dict_to_dict_of_list([]) == {}
    with pytest.raises(AssertionError):
        list_of_dict_to_dict_of_list([{"a": 1}, {"b": 2}])


def test_print_size_counts_tensors_and_arrays(capsys):
    rows = DataProto.from_dict(
        {"a": torch.zeros(2**18, 4)}, {"x": np.zeros(2**18, dtype=np.float64)}
    )  # 4 MiB and 2 MiB
    rows.print_size("rollout")
    assert capsys.readouterr().out == (
        f"rollout, size of tensordict: {4 / 1024:.6f} GB, size of non_tensor_batch: {2 / 1024:.6f} GB\n"
    )


def test_to_moves_in_place():
    rows = make_rows(2)
    assert rows.to("meta") is rows and rows.batch["a"].device.type == "meta"
