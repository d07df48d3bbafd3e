"""Whether dispatch may pad rows to a multiple of the number of workers, and where it says how many it added."""

from __future__ import annotations

import os

__all__ = ["AUTO_PADDING_META_KEY", "DataProtoConfig"]

# Under this key of the keyword arguments a dispatch function tells the caller how many rows of padding it added.
_padding_size_key = "_padding_size_key_x123d"

# In the facts of rows that may be padded.
AUTO_PADDING_META_KEY = "_verl_auto_padding"


class _DataProtoConfigMeta(type):
    _auto_padding: bool | None = None

    @property
    def auto_padding(cls) -> bool:
        """Whether every DataProto may be padded to divide over the workers (also ``VERL_AUTO_PADDING=1``)."""
        from_environment = os.environ.get("VERL_AUTO_PADDING", "FALSE").upper() in ("TRUE", "1")
        return from_environment or bool(cls._auto_padding)

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        assert isinstance(enabled, bool), f"auto_padding is a bool, not {enabled!r}"
        cls._auto_padding = enabled


class DataProtoConfig(metaclass=_DataProtoConfigMeta):
    """Process-wide switches of :class:`DataProto`."""
