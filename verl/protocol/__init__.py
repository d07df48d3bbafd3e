"""The rows that travel between the driver and the workers.

A :class:`DataProto` is a table of N rows. Tensors live in ``batch`` (a ``TensorDict`` with one batch dimension of
size N), everything else in ``non_tensor_batch`` (NumPy columns of length N), and what is true of all rows in
``meta_info``. Ragged columns, such as prompt token ids of their true length, are one-dimensional object arrays.

Worked example, two rows of at most three response tokens::

    rows = DataProto.from_dict(
        tensors={"responses": torch.tensor([[5, 6, 0], [7, 8, 9]])},          # (2, 3)
        non_tensors={"prompt_ids": object_array([np.array([1, 2]), np.array([3])])},  # (2,) of arrays
        meta_info={"temperature": 1.0},
    )
    first, second = rows.chunk(2)

Misuse of the container is a mistake in a program, not of a user, and raises ``AssertionError``.
"""

from __future__ import annotations

from verl.protocol.auto_padding import DataProtoConfig
from verl.protocol.auto_padding import _padding_size_key as _padding_size_key
from verl.protocol.data_proto import DataProto, DataProtoItem, collate_fn
from verl.protocol.future import DataProtoFuture
from verl.protocol.padding import pad_dataproto_to_divisor, unpad_dataproto
from verl.protocol.row_ops import (
    all_gather_data_proto,
    fold_batch_dim,
    list_of_dict_to_dict_of_list,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
)

__all__ = [
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "all_gather_data_proto",
    "collate_fn",
    "fold_batch_dim",
    "list_of_dict_to_dict_of_list",
    "pad_dataproto_to_divisor",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]
