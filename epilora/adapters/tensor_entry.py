"""A tensor of an adapter's weights, as the file describes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

FLOAT_BYTES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of an element of the dtypes that an adapter may have."""

MAX_NAME_LENGTH = 256
"""Of a tensor. Names go into messages, and what a gRPC status can carry is small."""


class TensorEntry(NamedTuple):
    """A tensor of a safetensors file. A tuple, since an adapter has tens of thousands and they are made all at once."""

    index: int  # type: ignore[assignment]
    """In order of offset, from 0."""
    name: str
    dtype: str
    """A key of FLOAT_BYTES."""
    shape: tuple[int, ...]
    offset: int
    """First byte in the file."""
    size_bytes: int
    file: int = 0
    """Which of the adapter's weight files."""

    @property
    def num_columns(self) -> int:
        """Extent of the last dimension. Every tensor is read as a matrix: all dimensions before it are its rows."""
        return self.shape[-1] if self.shape else 1

    @property
    def num_rows(self) -> int:
        """Product of all dimensions but the last."""
        return math.prod(self.shape[:-1])
