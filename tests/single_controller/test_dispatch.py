"""Dispatch rules without Ray."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.single_controller.base import ResourcePool, Worker, WorkerGroup
from verl.single_controller.base.decorator import (
    DISPATCH_MODE_FN_REGISTRY,
    MAGIC_ATTR,
    Dispatch,
    Execute,
    _check_dispatch_mode,
    _split_args_kwargs_data_proto_with_auto_padding,
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from verl.single_controller.base.worker import DistGlobalInfo, DistRankInfo


def test_modes_of_the_reference_are_there_and_pickle_as_singletons():
    assert Dispatch.names() == [
        "RANK_ZERO", "ONE_TO_ALL", "ALL_TO_ALL", "MEGATRON_COMPUTE", "MEGATRON_PP_AS_DP", "MEGATRON_PP_ONLY",
        "MEGATRON_COMPUTE_PROTO", "MEGATRON_PP_AS_DP_PROTO", "DP_COMPUTE", "DP_COMPUTE_PROTO",
        "DP_COMPUTE_PROTO_WITH_FUNC", "DP_COMPUTE_METRIC", "DIRECT_ROLLOUT_METHOD",
    ]  # fmt: skip
    assert Execute.names() == ["ALL", "RANK_ZERO"]
    for mode in (*Dispatch, *Execute):
        assert pickle.loads(pickle.dumps(mode)) is mode
    assert Dispatch.from_name("one_to_all") is Dispatch.ONE_TO_ALL and Dispatch.from_name("nothing") is None
    assert set(DISPATCH_MODE_FN_REGISTRY) == set(Dispatch)
    assert get_predefined_execute_fn(Execute.RANK_ZERO) == {"execute_fn_name": "execute_rank_zero"}


def test_users_add_and_change_modes():
    def dispatch(group, *args, **kwargs):
        return args, kwargs

    def collect(group, output):
        return output

    register_dispatch_mode("TEST_MODE", dispatch, collect)
    try:
        _check_dispatch_mode(Dispatch.TEST_MODE)
        assert get_predefined_dispatch_fn(Dispatch.TEST_MODE) == {"dispatch_fn": dispatch, "collect_fn": collect}
        with pytest.raises(ValueError, match="already registered"):
            register_dispatch_mode("test_mode", dispatch, collect)
        update_dispatch_mode(Dispatch.TEST_MODE, collect, dispatch)
        assert get_predefined_dispatch_fn(Dispatch.TEST_MODE)["dispatch_fn"] is collect
    finally:
        del DISPATCH_MODE_FN_REGISTRY[Dispatch.remove("TEST_MODE")]
    assert "TEST_MODE" not in Dispatch and not hasattr(Dispatch, "TEST_MODE")


def test_register_marks_methods_and_checks_modes():
    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO, blocking=False)
    def method(self, x):
        return x + 1

    assert method(None, 1) == 2 and method.__name__ == "method"
    assert getattr(method, MAGIC_ATTR) == {
        "dispatch_mode": Dispatch.ONE_TO_ALL, "execute_mode": Execute.RANK_ZERO, "blocking": False
    }  # fmt: skip
    with pytest.raises(AssertionError):
        register(dispatch_mode="ONE_TO_ALL")
    with pytest.raises(AssertionError, match="collect_fn"):
        register(dispatch_mode={"dispatch_fn": print})
    with pytest.raises(AssertionError):
        register(execute_mode="ALL")


def test_padding_size_and_parts():
    rows = DataProto.from_dict({"a": torch.arange(6)}, auto_padding=True)
    args, kwargs = _split_args_kwargs_data_proto_with_auto_padding(4, rows, same=rows)
    assert [part.batch["a"].tolist() for part in args[0]] == [[0, 1], [2, 3], [4, 5], [5, 5]]
    assert [part.batch["a"].tolist() for part in kwargs["same"]] == [[0, 1], [2, 3], [4, 5], [5, 5]]
    assert kwargs["_padding_size_key_x123d"] == 2 and len(rows) == 6
    _, kwargs = _split_args_kwargs_data_proto_with_auto_padding(3, same=rows)
    assert kwargs.get("_padding_size_key_x123d", 0) == 0 and [len(part) for part in kwargs["same"]] == [2, 2, 2]
    with pytest.raises(AssertionError, match="equally long"):
        _split_args_kwargs_data_proto_with_auto_padding(
            2, rows, DataProto.from_dict({"a": torch.zeros(3)}, auto_padding=True)
        )


def grid():
    """Tensor rank fastest, then data, then pipeline: 2 x 2 x 2 ranks."""
    infos = [DistRankInfo(tp_rank=r % 2, dp_rank=r // 2 % 2, pp_rank=r // 4) for r in range(8)]
    return SimpleNamespace(
        world_size=8,
        get_megatron_global_info=lambda: DistGlobalInfo(tp_size=2, dp_size=2, pp_size=2),
        get_megatron_rank_info=lambda rank: infos[rank],
    )


def apply(mode, group, *args):
    functions = get_predefined_dispatch_fn(mode)
    args, _ = functions["dispatch_fn"](group, *args)
    return args[0], functions["collect_fn"](group, list(args[0]))


def test_grid_modes():
    group = grid()
    sent, collected = apply(Dispatch.MEGATRON_COMPUTE, group, ["d0", "d1"])
    assert sent == ["d0", "d0", "d1", "d1"] * 2 and collected == ["d0", "d1"]
    parts = ["d0p0", "d0p1", "d1p0", "d1p1"]
    sent, collected = apply(Dispatch.MEGATRON_PP_AS_DP, group, parts)
    assert sent == ["d0p0", "d0p0", "d1p0", "d1p0", "d0p1", "d0p1", "d1p1", "d1p1"] and collected == parts
    collect = get_predefined_dispatch_fn(Dispatch.MEGATRON_PP_ONLY)["collect_fn"]
    assert collect(group, list(range(8))) == [0, 4]
    rows = DataProto.from_dict({"a": torch.arange(8)}, {"x": np.arange(8)})
    for mode in (Dispatch.MEGATRON_COMPUTE_PROTO, Dispatch.MEGATRON_PP_AS_DP_PROTO):
        sent, collected = apply(mode, group, rows)
        assert len(sent) == 8 and collected.batch["a"].tolist() == list(range(8))


def test_worker_without_a_group(monkeypatch):
    for key in ("RANK", "WORLD_SIZE", "WG_PREFIX"):
        monkeypatch.delenv(key, raising=False)
    worker = Worker()
    assert (worker.rank, worker.world_size) == (0, 1) and repr(worker) == "Worker[rank 0/1]"


def test_resource_pool():
    pool = ResourcePool([2, 1])
    pool.add_node(3)
    assert pool.world_size == 6 and pool() == pool.store == [2, 1, 3]
    assert pool.local_world_size_list() == [2, 2, 1, 3, 3, 3] and pool.local_rank_list() == [0, 1, 0, 0, 1, 2]


def test_a_method_may_not_hide_one_of_the_group():
    class Clash(Worker):
        @register()
        def start_worker_aliveness_check(self):
            return None

    group = WorkerGroup(ResourcePool([1]))
    group.execute_all = group.execute_rank_zero = lambda *args: None
    with pytest.raises(ValueError, match="rename the worker's method"):
        group._bind_worker_method(Clash, lambda *args, **kwargs: None)
