"""One packed row a token, so that one collective carries everything that belongs to it.

A row is bytes; each part starts at a multiple of 16 of them, so that every part is a view of its own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_ALIGNMENT = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One part of a packed row: where its bytes are, and what they hold."""

    start: int
    num_bytes: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLayout:
    """The columns of a packed row, in order, and its bytes in all."""

    columns: tuple[Column, ...]
    row_bytes: int

    @classmethod
    def of(cls, parts: Sequence[torch.Tensor]) -> RowLayout:
        """The layout of rows made of [T, n] parts.

        Example: parts of [T, 3] float32 and [T, 1] int32 -> columns at 0 and 16, rows of 32 bytes.
        """
        columns, start = [], 0
        for part in parts:
            num_bytes = part.shape[1] * part.element_size()
            columns.append(Column(start=start, num_bytes=num_bytes, dtype=part.dtype))
            start += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return cls(columns=tuple(columns), row_bytes=start)

    def write(self, rows: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Copies the parts into rows, uint8 [T, row_bytes]; bytes between them stay as they are."""
        for view, part in zip(self.views(rows), parts, strict=True):
            view.copy_(part)

    def views(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The parts of rows, uint8 [N, row_bytes], without a copy."""
        return [rows[:, c.start : c.start + c.num_bytes].view(c.dtype) for c in self.columns]
