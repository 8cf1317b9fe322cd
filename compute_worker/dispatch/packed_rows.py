"""One packed row a token, so that one collective carries everything that belongs to it.

A row is bytes: hidden state [D], weights float32 [K], physical experts int32 [K], extras int32 [X]. Each part starts at
a multiple of 16 bytes, so that every part is a view of its own dtype. On a GPU one launch writes rows, and one reads
them (`kernels.token_rows`): otherwise a row would cost more in copies than it saves in collectives.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from compute_worker.dispatch.base import ArrivedTokens, ExtraTensors, local_slots

if TYPE_CHECKING:
    from compute_worker.kernels.token_rows import RowWords

_ALIGNMENT = 16
_WORD_BYTES = 4
HAS_TRITON = importlib.util.find_spec("triton") is not None


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
        return cls.of_counts([(part.shape[1], part.dtype) for part in parts])

    @classmethod
    def of_counts(cls, parts: Sequence[tuple[int, torch.dtype]]) -> RowLayout:
        """The layout of rows made of so many elements of these types."""
        columns, start = [], 0
        for count, dtype in parts:
            num_bytes = count * dtype.itemsize
            columns.append(Column(start=start, num_bytes=num_bytes, dtype=dtype))
            start += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return cls(columns=tuple(columns), row_bytes=start)

    def write(self, rows: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Copies the parts into rows, uint8 [T, row_bytes]; bytes between them stay as they are."""
        for view, part in zip(self.views(rows), parts, strict=True):
            view.copy_(part)

    def views(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The parts of rows, uint8 [N, row_bytes], without a copy."""
        return [rows[:, c.start : c.start + c.num_bytes].view(c.dtype) for c in self.columns]


def pack_tokens(
    x_TD: torch.Tensor, weight_TK: torch.Tensor, expert_TK: torch.Tensor, extras: ExtraTensors, *, num_rows: int
) -> tuple[RowLayout, torch.Tensor]:
    """The tokens in rows, uint8 [num_rows, row_bytes], and their layout; padding after them.

    Padding rows hold zeros, experts and extras -1.
    """
    extra_TX, top_k = stacked_extras(extras, x_TD), expert_TK.shape[1]
    layout = RowLayout.of_counts(
        [
            (x_TD.shape[1], x_TD.dtype),
            (top_k, torch.float32),
            (top_k, torch.int32),
            (extra_TX.shape[1], torch.int32),
        ]
    )
    if uses_kernels(x_TD):
        from compute_worker.kernels.token_rows import pack_rows

        words = _words(layout)
        rows_MW = torch.empty((num_rows, words.num_words), dtype=torch.int32, device=x_TD.device)
        pack_rows(
            rows_MW,
            words,
            x_TD=x_TD.contiguous(),
            weight_TK=weight_TK.contiguous(),
            expert_TK=expert_TK.contiguous(),
            extra_TX=extra_TX.contiguous(),
        )
        return layout, rows_MW.view(torch.uint8)
    num_tokens = x_TD.shape[0]
    rows = torch.full((num_rows, layout.row_bytes), 255, dtype=torch.uint8, device=x_TD.device)
    if num_rows > num_tokens:
        # Bytes of 255 are -1 in the integer columns; in the float ones they would be NaN.
        rows[num_tokens:, : layout.columns[2].start] = 0
    layout.write(rows[:num_tokens], [x_TD, weight_TK.float(), expert_TK.int(), extra_TX])
    return layout, rows


def unpack_tokens(
    layout: RowLayout, rows: torch.Tensor, names: Sequence[str], *, first: int, end: int
) -> ArrivedTokens:
    """The tokens of rows, uint8 [N, row_bytes]; hidden states may be a view of them.

    Args:
        layout: of pack_tokens.
        rows: as they arrived.
        names: of the extras, in sorted order.
        first: physical expert of local slot 0.
        end: physical expert after the last local slot.
    """
    x_ND, weight_NK, expert_NK, extra_NX = layout.views(rows)
    if not uses_kernels(x_ND):
        return ArrivedTokens(
            x_ND=x_ND,
            slot_NK=local_slots(expert_NK, first, end),
            weight_NK=weight_NK,
            extras=dict(zip(names, extra_NX.t(), strict=True)),
        )
    from compute_worker.kernels.token_rows import unpack_rows

    parts = unpack_rows(rows.view(torch.int32), _words(layout), first=first, end=end)
    return ArrivedTokens(
        x_ND=parts.x_NW.view(x_ND.dtype) if x_ND.shape[1] else x_ND,
        slot_NK=parts.slot_NK,
        weight_NK=parts.weight_NK,
        extras=dict(zip(names, parts.extra_XN, strict=True)),
    )


def uses_kernels(x_TD: torch.Tensor) -> bool:
    """True on a GPU that Triton compiles for, if rows of x are whole words."""
    return x_TD.is_cuda and HAS_TRITON and x_TD.shape[1] * x_TD.element_size() % _WORD_BYTES == 0


def stacked_extras(extras: ExtraTensors, x_TD: torch.Tensor) -> torch.Tensor:
    """int32 [T, X], in order of name."""
    columns = [extras[name].int() for name in sorted(extras)]
    if len(columns) == 1:
        return columns[0].unsqueeze(1)
    if not columns:
        return torch.empty((x_TD.shape[0], 0), dtype=torch.int32, device=x_TD.device)
    return torch.stack(columns, dim=1)


def _words(layout: RowLayout) -> RowWords:
    from compute_worker.kernels.token_rows import RowWords

    x, weight, expert, extra = layout.columns
    return RowWords(
        num_x_words=x.num_bytes // _WORD_BYTES,
        weight_at=weight.start // _WORD_BYTES,
        expert_at=expert.start // _WORD_BYTES,
        extra_at=extra.start // _WORD_BYTES,
        num_words=layout.row_bytes // _WORD_BYTES,
        top_k=weight.num_bytes // _WORD_BYTES,
        num_extras=extra.num_bytes // _WORD_BYTES,
    )
