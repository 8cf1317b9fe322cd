"""Tensor messages <-> torch tensors."""

from __future__ import annotations

import numpy as np
import torch

from epilora.errors import InvalidArgumentError
from epilora.v1 import types_pb2
from epilora.wire import decode_tensor

_TORCH_OF = {
    types_pb2.DATA_TYPE_FLOAT32: torch.float32,
    types_pb2.DATA_TYPE_FLOAT16: torch.float16,
    types_pb2.DATA_TYPE_BFLOAT16: torch.bfloat16,
    types_pb2.DATA_TYPE_INT32: torch.int32,
    types_pb2.DATA_TYPE_INT64: torch.int64,
}
_ENUM_OF = {dtype: enum for enum, dtype in _TORCH_OF.items()}
FLOAT_TYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


def data_type_of(dtype: torch.dtype) -> types_pb2.DataType:
    """The proto enum of a torch dtype."""
    return _ENUM_OF[dtype]


def to_torch(tensor: types_pb2.Tensor, *, field: str, shape: tuple[int | None, ...]) -> torch.Tensor:
    """The tensor of a message, checked against a shape (None: any extent).

    Raises:
        InvalidArgumentError: bad dtype, size or shape.
    """
    array = decode_tensor(tensor, field=field)
    if len(array.shape) != len(shape) or any(w is not None and w != g for w, g in zip(shape, array.shape, strict=True)):
        wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise InvalidArgumentError(
            f"{field} has shape {list(array.shape)}, expected {len(shape)} dimensions, [{wanted}]",
            reason="BAD_TENSOR",
            field=f"{field}.shape",
        )
    # A copy: the message's bytes are read-only and go away with it.
    result = torch.from_numpy(array.copy())
    return result.view(torch.bfloat16) if tensor.dtype == types_pb2.DATA_TYPE_BFLOAT16 else result


def to_message(tensor: torch.Tensor) -> types_pb2.Tensor:
    """The message of a CPU tensor."""
    contiguous = tensor.contiguous()
    array = contiguous.view(torch.uint16).numpy() if tensor.dtype is torch.bfloat16 else contiguous.numpy()
    return types_pb2.Tensor(dtype=_ENUM_OF[tensor.dtype], shape=array.shape, data=array.tobytes())


def array_to_message(array: np.ndarray) -> types_pb2.Tensor:  # type: ignore[type-arg]
    """The message of a float32 array."""
    return types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_FLOAT32, shape=array.shape, data=array.astype("<f4").tobytes())
