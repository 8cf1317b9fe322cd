"""What only the values of an adapter show: NaN and infinities, and pairs that change nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from epilora.adapters.keys import named
from epilora.adapters.normal_form import NUMPY_DTYPE, LoraPair, NormalForm, Region
from epilora.adapters.open_adapter import OpenAdapter
from epilora.adapters.tensor_entry import TensorEntry
from epilora.errors import AbortedError, AdapterFormatError

_BLOCK_BYTES = 4 << 20
# (first non-finite positive, first non-finite negative): exponent bits all ones, seen as signed and unsigned integers.
_NON_FINITE = {"BF16": (0x7F80, 0xFF80), "F16": (0x7C00, 0xFC00), "F32": (0x7F800000, 0xFF800000)}


def is_finite(bits: npt.NDArray[Any], dtype: str) -> bool:
    """False if NaN or an infinity is among values, given as the unsigned integers that their bits are."""
    positive, negative = _NON_FINITE[dtype]
    # Two maxima read the data without writing any: positive numbers are the largest signed, negative ones unsigned.
    return int(bits.view(bits.dtype.str.replace("u", "i")).max()) < positive and int(bits.max()) < negative


def non_finite(tensor: TensorEntry) -> AdapterFormatError:
    """The error of a tensor that holds NaN or an infinity."""
    return AdapterFormatError(
        f"tensor {tensor.name} holds NaN or infinite values; the training run that wrote it diverged",
        reason="NON_FINITE",
        metadata={"tensor": tensor.name},
    )


def zero_warnings(
    form: NormalForm, is_zero: Callable[[Region], bool], was_read: Callable[[LoraPair], bool] = lambda _: True
) -> list[str]:
    """Pairs whose A or B is zero change nothing: legal, and hardly what was meant.

    Args:
        form: the adapter.
        is_zero: true for a matrix that is all zero.
        was_read: pairs that it is known of.
    """
    pairs = [
        (pair, f"{pair.a.tensor.name} of expert {expert}")
        for by_expert in form.experts.values()
        for expert, pair in by_expert.items()
    ]
    pairs += [(pair, pair.a.tensor.name) for pair in form.dense.values()]
    seen = [(pair, name) for pair, name in pairs if was_read(pair)]
    # With DoRA the magnitude changes the output even then.
    zero = [name for pair, name in seen if pair.magnitude is None and (is_zero(pair.a) or is_zero(pair.b))]
    if not zero:
        return []
    all_of_them = " The adapter changes nothing: it was saved untrained." if len(zero) == len(seen) else ""
    return [
        f"{len(zero)} of {len(seen)} pairs have a matrix that is all zero and change nothing, first {min(zero)}."
        f"{all_of_them}"
    ]


@dataclass(slots=True)
class _Nonzero:
    """Rows and columns of tensors, as matrices, in which something is not zero; by the tensor's index."""

    rows: dict[int, npt.NDArray[np.bool_]] = field(default_factory=dict)
    columns: dict[int, npt.NDArray[np.bool_]] = field(default_factory=dict)

    def is_zero(self, region: Region) -> bool:
        """A matrix is some whole rows, or some whole columns, of its tensor."""
        index = region.tensor.index
        if region.column_step != 1:
            return not self.columns[index][region.column_begin :: region.column_step].any()
        return not self.rows[index][region.row_begin : region.row_end].any()


def check_values(adapter: OpenAdapter, form: NormalForm | None) -> list[str]:
    """Reads every value of the tensors that are put to use; of all tensors, if it is not known which are.

    Returns:
        Warnings.

    Raises:
        AdapterFormatError: reason NON_FINITE.
        AbortedError: reason SOURCE_CHANGED; a file became shorter.
    """
    used, found = None if form is None else form.used_indices(), _Nonzero()
    for tensor in adapter.header.tensors:
        if tensor.size_bytes and (used is None or tensor.index in used):
            _read(adapter.weights.descriptors[tensor.file], tensor, found)
    if form is not None:
        return zero_warnings(form, found.is_zero)
    zero = [tensor.name for tensor in adapter.header.tensors if not found.rows.get(tensor.index, np.ones(1)).any()]
    return [f"{len(zero)} tensors are all zero: {named(zero)}"] if zero else []


def _read(fd: int, tensor: TensorEntry, found: _Nonzero) -> None:
    dtype, num_rows, num_columns = NUMPY_DTYPE[tensor.dtype], tensor.num_rows, tensor.num_columns
    rows = found.rows[tensor.index] = np.zeros(num_rows, np.bool_)
    columns = found.columns[tensor.index] = np.zeros(num_columns, np.bool_)
    row_bytes = num_columns * dtype.itemsize
    step = max(1, _BLOCK_BYTES // row_bytes)
    for begin in range(0, num_rows, step):
        count = min(step, num_rows - begin)
        raw = os.pread(fd, count * row_bytes, tensor.offset + begin * row_bytes)
        if len(raw) != count * row_bytes:
            raise AbortedError(
                f"{tensor.name} ended before its {num_rows} rows were read: the file was changed",
                reason="SOURCE_CHANGED",
            )
        bits = np.frombuffer(raw, dtype).reshape(count, num_columns)
        if not is_finite(bits, tensor.dtype):
            raise non_finite(tensor)
        # Without the sign, which a zero may have, too.
        is_set = (bits << 1).astype(np.bool_)
        rows[begin : begin + count] = is_set.any(axis=1)
        columns |= is_set.any(axis=0)
