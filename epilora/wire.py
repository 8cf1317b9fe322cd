"""Tensor messages <-> numpy arrays, with the checks of the contract in `types.proto`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from epilora.errors import InvalidArgumentError
from epilora.v1 import types_pb2

_NUMPY_OF: dict[int, np.dtype[Any]] = {
    types_pb2.DATA_TYPE_FLOAT32: np.dtype("<f4"),
    types_pb2.DATA_TYPE_FLOAT16: np.dtype("<f2"),
    # numpy has no bfloat16: its bits travel as uint16, and torch views them.
    types_pb2.DATA_TYPE_BFLOAT16: np.dtype("<u2"),
    types_pb2.DATA_TYPE_INT32: np.dtype("<i4"),
    types_pb2.DATA_TYPE_INT64: np.dtype("<i8"),
}


def decode_tensor(tensor: types_pb2.Tensor, *, field: str) -> npt.NDArray[Any]:
    """The array of a message; bfloat16 comes as its uint16 bits. Read-only, shares the message's bytes.

    Raises:
        InvalidArgumentError: unknown dtype, negative extent, or a size that does not match the shape.
    """
    dtype = _NUMPY_OF.get(tensor.dtype)
    if dtype is None:
        raise InvalidArgumentError(
            f"{field}.dtype is {tensor.dtype}, expected one of {sorted(_NUMPY_OF)}",
            reason="BAD_TENSOR",
            field=f"{field}.dtype",
        )
    shape = tuple(tensor.shape)
    data = tensor.data
    expected = math.prod(shape) * dtype.itemsize
    if any(extent < 0 for extent in shape) or len(data) != expected:
        raise InvalidArgumentError(
            f"{field} has {len(data)} bytes, expected {expected} for shape {list(shape)} of {dtype.name}",
            reason="BAD_TENSOR",
            field=f"{field}.data",
            metadata={"expected_bytes": expected, "got_bytes": len(data)},
        )
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def encode_tensor(array: npt.NDArray[Any], dtype: types_pb2.DataType) -> types_pb2.Tensor:
    """The message of an array whose elements are already those of `dtype` (uint16 bits for bfloat16)."""
    assert array.dtype == _NUMPY_OF[dtype], (array.dtype, dtype)
    return types_pb2.Tensor(dtype=dtype, shape=array.shape, data=array.tobytes())
