"""Telling rows from other arguments.

``verl.protocol`` brings torch and tensordict along, which take seconds to import. It is imported here when the first
call is made, so that a driver can start its ranks, and a rank can find its peers, before that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from verl.protocol import DataProto, DataProtoFuture

__all__ = ["is_rows", "is_rows_to_come"]


def is_rows(value: Any) -> TypeGuard[DataProto]:
    """Whether ``value`` is a :class:`~verl.protocol.DataProto`."""
    from verl.protocol import DataProto

    return isinstance(value, DataProto)


def is_rows_to_come(value: Any) -> TypeGuard[DataProtoFuture]:
    """Whether ``value`` is a :class:`~verl.protocol.DataProtoFuture`."""
    from verl.protocol import DataProtoFuture

    return isinstance(value, DataProtoFuture)
