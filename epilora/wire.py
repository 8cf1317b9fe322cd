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
MAX_DIMENSIONS = 64
MAX_BYTES = 2**63 - 1
"""What numpy can describe."""


def check_tensor(tensor: types_pb2.Tensor, *, field: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """The element type (uint16 for bfloat16) and shape of a message whose data matches them; reads no data.

    Raises:
        InvalidArgumentError: unknown dtype, negative extent, more dimensions or elements than an
            array may have, or a size that does not match the shape.
    """
    dtype = _NUMPY_OF.get(tensor.dtype)
    if dtype is None:
        expected = ", ".join(types_pb2.DataType.Name(known) for known in sorted(_NUMPY_OF))
        raise _bad(field, "dtype", f"{field}.dtype is {_dtype_name(tensor.dtype)}, expected one of {expected}")
    shape = tuple(tensor.shape)
    for index, extent in enumerate(shape):
        if extent < 0:
            raise _bad(field, "shape", f"{field}.shape[{index}] is {extent}, expected 0 or more")
    if len(shape) > MAX_DIMENSIONS:
        raise _bad(field, "shape", f"{field} has {len(shape)} dimensions, expected at most {MAX_DIMENSIONS}")
    # An extent of 0 makes the product 0, and numpy still refuses the others if they are too large.
    if math.prod(extent for extent in shape if extent) * dtype.itemsize > MAX_BYTES:
        raise _bad(field, "shape", f"{field} has shape {list(shape)}, expected at most {MAX_BYTES} bytes in all")
    num_bytes = math.prod(shape) * dtype.itemsize
    if len(tensor.data) != num_bytes:
        raise InvalidArgumentError(
            f"{field} has {len(tensor.data)} bytes, expected {num_bytes} for shape {list(shape)} "
            f"of {_dtype_name(tensor.dtype)}",
            reason="BAD_TENSOR",
            field=f"{field}.data",
            metadata={"expected_bytes": num_bytes, "got_bytes": len(tensor.data)},
        )
    return dtype, shape


def decode_tensor(tensor: types_pb2.Tensor, *, field: str) -> npt.NDArray[Any]:
    """The array of a message; bfloat16 comes as its uint16 bits. Read-only, shares the message's bytes.

    Raises:
        InvalidArgumentError: see check_tensor.
    """
    dtype, shape = check_tensor(tensor, field=field)
    return np.frombuffer(tensor.data, dtype=dtype).reshape(shape)


def _dtype_name(number: int) -> str:
    known = types_pb2.DataType.DESCRIPTOR.values_by_number.get(number)
    return str(number) if known is None else str(known.name)


def _bad(field: str, part: str, message: str) -> InvalidArgumentError:
    return InvalidArgumentError(message, reason="BAD_TENSOR", field=f"{field}.{part}")


def encode_tensor(array: npt.NDArray[Any], dtype: types_pb2.DataType) -> types_pb2.Tensor:
    """The message of an array whose elements are already those of `dtype` (uint16 bits for bfloat16)."""
    assert array.dtype == _NUMPY_OF[dtype], (array.dtype, dtype)
    return types_pb2.Tensor(dtype=dtype, shape=array.shape, data=array.tobytes())
