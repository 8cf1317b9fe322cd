"""Packed rows for dispatch, written in one launch and read in one.

A row is int32 words: hidden state, then float32 weights [K], expert ids [K] and extras [X], each from a given word on.

Everything is loaded before anything is stored: what is loaded after a store waits for it, since the compiler cannot
tell that they are different places, and each part of a row would add a trip to memory to a kernel that takes two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_BLOCK_WORDS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWords:
    """Where the parts of a row begin, and how many there are; all in words of 4 bytes."""

    num_x_words: int
    weight_at: int
    expert_at: int
    extra_at: int
    num_words: int
    top_k: int
    num_extras: int


@triton.jit(do_not_specialize=["num_tokens"])
def _pack_kernel(x_ptr, weight_ptr, expert_ptr, extra_ptr, row_ptr, num_tokens, x_stride, X_WORDS: tl.constexpr,
                 WEIGHT_AT: tl.constexpr, EXPERT_AT: tl.constexpr, EXTRA_AT: tl.constexpr, WORDS: tl.constexpr,
                 K: tl.constexpr, X: tl.constexpr, SMALL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    is_token = row < num_tokens
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < X_WORDS
    x = tl.load(x_ptr + row * x_stride + word, mask=inside & is_token, other=0)
    if tl.program_id(1) == 0:
        k = tl.arange(0, SMALL)
        weight = tl.load(weight_ptr + row * K + k, mask=(k < K) & is_token, other=0.0).to(tl.float32)
        expert = tl.load(expert_ptr + row * K + k, mask=(k < K) & is_token, other=-1).to(tl.int32)
        if X > 0:
            extra = tl.load(extra_ptr + row * X + k, mask=(k < X) & is_token, other=-1).to(tl.int32)
            tl.store(row_ptr + row * WORDS + EXTRA_AT + k, extra, mask=k < X)
        tl.store(row_ptr + row * WORDS + WEIGHT_AT + k, weight.to(tl.int32, bitcast=True), mask=k < K)
        tl.store(row_ptr + row * WORDS + EXPERT_AT + k, expert, mask=k < K)
    tl.store(row_ptr + row * WORDS + word, x, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "first", "end"])
def _unpack_kernel(row_ptr, x_ptr, slot_ptr, weight_ptr, extra_ptr, num_rows, first, end, X_WORDS: tl.constexpr,
                   WEIGHT_AT: tl.constexpr, EXPERT_AT: tl.constexpr, EXTRA_AT: tl.constexpr, WORDS: tl.constexpr,
                   K: tl.constexpr, X: tl.constexpr, SMALL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < X_WORDS
    x = tl.load(row_ptr + row * WORDS + word, mask=inside, other=0)
    if tl.program_id(1) == 0:
        k = tl.arange(0, SMALL)
        expert = tl.load(row_ptr + row * WORDS + EXPERT_AT + k, mask=k < K, other=-1)
        weight = tl.load(row_ptr + row * WORDS + WEIGHT_AT + k, mask=k < K, other=0)
        if X > 0:
            extra = tl.load(row_ptr + row * WORDS + EXTRA_AT + k, mask=k < X, other=-1)
            tl.store(extra_ptr + k * num_rows + row, extra, mask=k < X)
        slot = tl.where((expert >= first) & (expert < end), expert - first, -1)
        tl.store(slot_ptr + row * K + k, slot.to(tl.int64), mask=k < K)
        tl.store(weight_ptr + row * K + k, weight.to(tl.float32, bitcast=True), mask=k < K)
    tl.store(x_ptr + row * X_WORDS + word, x, mask=inside)


def pack_rows(
    rows_MW: torch.Tensor,
    words: RowWords,
    *,
    x_TD: torch.Tensor,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
    extra_TX: torch.Tensor,
) -> None:
    """Writes tokens into rows, and padding (zeros, experts and extras -1) into the rows after them.

    Semantics: row[t] = (x[t], weight[t], expert[t], extra[t]) for t < T.

    Args:
        rows_MW: int32, contiguous; M >= T. Words between the parts stay as they are.
        words: of a row.
        x_TD: rows of whole words, each contiguous.
        weight_TK: any float type, contiguous.
        expert_TK: int32 or int64, contiguous.
        extra_TX: int32 or int64, contiguous.
    """
    num_rows, num_words = rows_MW.shape
    # A tensor without elements has no view of another width.
    x_words = x_TD.view(torch.int32) if x_TD.shape[1] else x_TD.new_empty(x_TD.shape, dtype=torch.int32)
    if num_words != words.num_words or x_words.shape[1] != words.num_x_words or x_TD.shape[0] > num_rows:
        raise ValueError(f"rows {tuple(rows_MW.shape)} and x {tuple(x_words.shape)} in words, expected {words}")
    if num_rows == 0:
        return
    _pack_kernel[_grid(num_rows, words)](
        x_words, weight_TK, expert_TK, extra_TX, rows_MW, x_TD.shape[0], x_words.stride(0),
        X_WORDS=words.num_x_words, WEIGHT_AT=words.weight_at, EXPERT_AT=words.expert_at, EXTRA_AT=words.extra_at,
        WORDS=words.num_words, K=words.top_k, X=words.num_extras, SMALL=_small(words), BLOCK=_BLOCK_WORDS,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpackedRows:
    """What rows held: hidden states in words int32, slots int64, weights float32, extras int32."""

    x_NW: torch.Tensor
    slot_NK: torch.Tensor
    weight_NK: torch.Tensor
    extra_XN: torch.Tensor


def unpack_rows(rows_NW: torch.Tensor, words: RowWords, *, first: int, end: int) -> UnpackedRows:
    """The parts of rows, each contiguous, with local slots for experts.

    Semantics: slot[n, k] = expert[n, k] - first if first <= expert[n, k] < end, else -1.

    Example: experts [[4, 9], [-1, 5]], first 4, end 8 -> slots [[0, -1], [-1, 1]].
    """
    num_rows, device = rows_NW.shape[0], rows_NW.device
    parts = UnpackedRows(
        x_NW=torch.empty((num_rows, words.num_x_words), dtype=torch.int32, device=device),
        slot_NK=torch.empty((num_rows, words.top_k), dtype=torch.int64, device=device),
        weight_NK=torch.empty((num_rows, words.top_k), dtype=torch.float32, device=device),
        extra_XN=torch.empty((words.num_extras, num_rows), dtype=torch.int32, device=device),
    )
    if num_rows:
        _unpack_kernel[_grid(num_rows, words)](
            rows_NW, parts.x_NW, parts.slot_NK, parts.weight_NK, parts.extra_XN, num_rows, first, end,
            X_WORDS=words.num_x_words, WEIGHT_AT=words.weight_at, EXPERT_AT=words.expert_at,
            EXTRA_AT=words.extra_at, WORDS=words.num_words, K=words.top_k, X=words.num_extras, SMALL=_small(words),
            BLOCK=_BLOCK_WORDS,
        )  # fmt: skip
    return parts


def _grid(num_rows: int, words: RowWords) -> tuple[int, int]:
    """A program for each row and block of its hidden state; the first also takes what goes with it."""
    return num_rows, max(1, triton.cdiv(words.num_x_words, _BLOCK_WORDS))


def _small(words: RowWords) -> int:
    return int(triton.next_power_of_2(max(words.top_k, words.num_extras, 1)))
