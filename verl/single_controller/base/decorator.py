"""Dispatch rules: how the arguments of a call are spread over the workers and how their answers come together.

A worker's method is made callable from the driver with :func:`register`; the group (see
:mod:`verl.single_controller.ray.calls`) then calls ``dispatch_fn(group, *args, **kwargs)`` to get one list of arguments
per parameter, executes the method, and hands the list of answers to ``collect_fn(group, output)``.

Users add a rule with :func:`register_dispatch_mode`, or give ``register(dispatch_mode={"dispatch_fn": …,
"collect_fn": …})`` directly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from verl.single_controller.base import megatron_dispatch as megatron
from verl.single_controller.base.dispatch import (
    _split_args_kwargs_data_proto,
    _split_args_kwargs_data_proto_with_auto_padding,
    collect_all_to_all,
    collect_dp_compute,
    collect_dp_compute_data_proto,
    dispatch_all_to_all,
    dispatch_dp_compute,
    dispatch_dp_compute_data_proto,
    dispatch_dp_compute_data_proto_with_func,
    dispatch_one_to_all,
    dummy_direct_rollout_call,
)
from verl.single_controller.base.row_types import is_rows_to_come
from verl.utils.py_functional import DynamicEnum

__all__ = [
    "DISPATCH_MODE_FN_REGISTRY",
    "MAGIC_ATTR",
    "Dispatch",
    "Execute",
    "_split_args_kwargs_data_proto",
    "_split_args_kwargs_data_proto_with_auto_padding",
    "collect_all_to_all",
    "collect_dp_compute",
    "collect_dp_compute_data_proto",
    "dispatch_all_to_all",
    "dispatch_dp_compute",
    "dispatch_dp_compute_data_proto",
    "dispatch_dp_compute_data_proto_with_func",
    "dispatch_one_to_all",
    "dummy_direct_rollout_call",
    "get_predefined_dispatch_fn",
    "get_predefined_execute_fn",
    "register",
    "register_dispatch_mode",
    "update_dispatch_mode",
]

# A registered method carries its rules under this attribute.
MAGIC_ATTR = "attrs_3141562937"


class Dispatch(DynamicEnum):
    """How arguments are spread over the workers and answers are collected."""

    _registry = {}
    _next_value = 0


class Execute(DynamicEnum):
    """Which workers run the call."""

    _registry = {}
    _next_value = 0


def init_predefined_dispatch_mode() -> None:
    """Register the members of :class:`Dispatch` that come with this package."""
    for name in (
        "RANK_ZERO",
        "ONE_TO_ALL",
        "ALL_TO_ALL",
        "MEGATRON_COMPUTE",
        "MEGATRON_PP_AS_DP",
        "MEGATRON_PP_ONLY",
        "MEGATRON_COMPUTE_PROTO",
        "MEGATRON_PP_AS_DP_PROTO",
        "DP_COMPUTE",
        "DP_COMPUTE_PROTO",
        "DP_COMPUTE_PROTO_WITH_FUNC",
        "DP_COMPUTE_METRIC",
        "DIRECT_ROLLOUT_METHOD",
    ):
        Dispatch.register(name)


def init_predefined_execute_mode() -> None:
    """Register the members of :class:`Execute`."""
    Execute.register("ALL")
    Execute.register("RANK_ZERO")


init_predefined_dispatch_mode()
init_predefined_execute_mode()


def _modes(**functions: Any) -> dict[str, Callable]:
    return functions


DISPATCH_MODE_FN_REGISTRY: dict[Dispatch, dict[str, Callable]] = {
    Dispatch.RANK_ZERO: _modes(dispatch_fn=dispatch_all_to_all, collect_fn=collect_all_to_all),
    Dispatch.ONE_TO_ALL: _modes(dispatch_fn=dispatch_one_to_all, collect_fn=collect_all_to_all),
    Dispatch.ALL_TO_ALL: _modes(dispatch_fn=dispatch_all_to_all, collect_fn=collect_all_to_all),
    Dispatch.MEGATRON_COMPUTE: _modes(dispatch_fn=megatron.dispatch_compute, collect_fn=megatron.collect_compute),
    Dispatch.MEGATRON_PP_AS_DP: _modes(dispatch_fn=megatron.dispatch_pp_as_dp, collect_fn=megatron.collect_pp_as_dp),
    Dispatch.MEGATRON_PP_ONLY: _modes(dispatch_fn=dispatch_one_to_all, collect_fn=megatron.collect_pp_only),
    Dispatch.MEGATRON_COMPUTE_PROTO: _modes(
        dispatch_fn=megatron.cut_rows(megatron.dispatch_compute, megatron.data_parallel_parts),
        collect_fn=megatron.join_rows(megatron.collect_compute),
    ),
    Dispatch.MEGATRON_PP_AS_DP_PROTO: _modes(
        dispatch_fn=megatron.cut_rows(megatron.dispatch_pp_as_dp, megatron.pipeline_data_parallel_parts),
        collect_fn=megatron.join_rows(megatron.collect_pp_as_dp),
    ),
    Dispatch.DP_COMPUTE: _modes(dispatch_fn=dispatch_dp_compute, collect_fn=collect_dp_compute),
    Dispatch.DP_COMPUTE_PROTO: _modes(
        dispatch_fn=dispatch_dp_compute_data_proto, collect_fn=collect_dp_compute_data_proto
    ),
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: _modes(
        dispatch_fn=dispatch_dp_compute_data_proto_with_func, collect_fn=collect_dp_compute_data_proto
    ),
    Dispatch.DP_COMPUTE_METRIC: _modes(dispatch_fn=dispatch_dp_compute_data_proto, collect_fn=collect_dp_compute),
    Dispatch.DIRECT_ROLLOUT_METHOD: _modes(dispatch_fn=dummy_direct_rollout_call, collect_fn=dummy_direct_rollout_call),
}

_EXECUTE_MODE_FN_REGISTRY: dict[Execute, dict[str, str]] = {
    Execute.ALL: {"execute_fn_name": "execute_all"},
    Execute.RANK_ZERO: {"execute_fn_name": "execute_rank_zero"},
}


def get_predefined_dispatch_fn(dispatch_mode: Dispatch) -> dict[str, Callable]:
    """The functions of a mode: ``{"dispatch_fn": …, "collect_fn": …}``."""
    return DISPATCH_MODE_FN_REGISTRY[dispatch_mode]


def register_dispatch_mode(dispatch_mode_name: str, dispatch_fn: Callable, collect_fn: Callable) -> None:
    """Add the member ``dispatch_mode_name`` to :class:`Dispatch`; ``ValueError`` when the name is taken."""
    dispatch_mode = Dispatch.register(dispatch_mode_name)
    DISPATCH_MODE_FN_REGISTRY[dispatch_mode] = _modes(dispatch_fn=dispatch_fn, collect_fn=collect_fn)


def update_dispatch_mode(dispatch_mode: Dispatch, dispatch_fn: Callable, collect_fn: Callable) -> None:
    """Replace the functions of an existing mode."""
    _check_dispatch_mode(dispatch_mode)
    assert dispatch_mode in DISPATCH_MODE_FN_REGISTRY, f"{dispatch_mode} is not registered"
    DISPATCH_MODE_FN_REGISTRY[dispatch_mode] = _modes(dispatch_fn=dispatch_fn, collect_fn=collect_fn)


def get_predefined_execute_fn(execute_mode: Execute) -> dict[str, str]:
    """The name of the group's method that runs a call: ``{"execute_fn_name": …}``."""
    return _EXECUTE_MODE_FN_REGISTRY[execute_mode]


def _check_dispatch_mode(dispatch_mode: Dispatch | dict[str, Callable]) -> None:
    assert isinstance(dispatch_mode, (Dispatch, dict)), f"dispatch_mode is a Dispatch or a dict, not {dispatch_mode!r}"
    if isinstance(dispatch_mode, dict):
        for key in ("dispatch_fn", "collect_fn"):
            assert key in dispatch_mode, f"a dispatch_mode dictionary needs the key {key!r}"


def _check_execute_mode(execute_mode: Execute) -> None:
    assert isinstance(execute_mode, Execute), f"execute_mode is an Execute, not {execute_mode!r}"


def _materialize_futures(*args: Any, **kwargs: Any) -> tuple[tuple, dict]:
    """Wait for the arguments that are futures."""

    def materialize(value: Any) -> Any:
        return value.get() if is_rows_to_come(value) else value

    return tuple(materialize(arg) for arg in args), {key: materialize(value) for key, value in kwargs.items()}


def register(
    dispatch_mode: Dispatch | dict[str, Callable] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[Callable], Callable]:
    """Make a worker's method (plain or ``async``) callable on the worker's group.

    Args:
        dispatch_mode: how arguments are spread and answers collected.
        execute_mode: which workers run the call.
        blocking: whether the call on the group waits for the answers; otherwise it returns Ray references, or a
            :class:`~verl.protocol.DataProtoFuture` for the modes that collect DataProto.
        materialize_futures: whether the worker waits for arguments that are futures before the method starts.
    """
    _check_dispatch_mode(dispatch_mode)
    _check_execute_mode(execute_mode)

    def decorate(method: Callable) -> Callable:
        @wraps(method)
        def plain(*args: Any, **kwargs: Any) -> Any:
            if materialize_futures:
                args, kwargs = _materialize_futures(*args, **kwargs)
            return method(*args, **kwargs)

        @wraps(method)
        async def asynchronous(*args: Any, **kwargs: Any) -> Any:
            if materialize_futures:
                args, kwargs = _materialize_futures(*args, **kwargs)
            return await method(*args, **kwargs)

        wrapper = asynchronous if inspect.iscoroutinefunction(method) else plain
        setattr(
            wrapper,
            MAGIC_ATTR,
            {"dispatch_mode": dispatch_mode, "execute_mode": execute_mode, "blocking": blocking},
        )
        return wrapper

    return decorate
