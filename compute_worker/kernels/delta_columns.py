"""LoRA deltas in the epilogue of a GEMM over base tiles, by a list of the columns that each tile needs.

The first programs of the gate and up shrinks write, for each base tile, the list of its groups of GROUP extra K
columns: those of the adapters that have rows in the tile, each as many as its own rank takes, one adapter after
another. The epilogue goes through the list: it reads no B that no row needs, and adapters of different ranks stand
beside each other in one step.

Example: rows of slots -1, 0, 0, 5, 9 with ranks 8, 40, 16 make the groups 0, 5, 5, 5, 9: two steps of 64 columns.

An adapter's ranks begin at a multiple of GROUP, which the matrix unit sums at once: so the bits of its rows depend on
no other adapter either. The columns of other adapters meet a row as exact zeros; adapters are finite by contract.

A group is two int64 words for each projection: the address of its B in output row 0; and, from the lowest bit, 32 bits
bin of its rows, 11 elements of B from one output row to the next, 5 how many of its columns there are (0 where this
projection's rank is smaller than its neighbour's), 5 its number in the adapter, 1 shrink result it takes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from compute_worker.kernels.tiles import base_tile, bin_of_rows

GROUP = 16
_GROUP = tl.constexpr(GROUP)


class Columns(NamedTuple):
    """What the tiles of one GEMM add to their K columns."""

    num_groups: torch.Tensor
    """int32 [base tiles]: groups of each tile."""
    words: torch.Tensor
    """int64 [base tiles, groups a tile may have, projections, 2]; undefined past its num_groups."""


def max_groups(block_m: int, num_slots: int, max_lora_rank: int) -> int:
    """Most groups that a base tile of block_m rows can need."""
    return min(block_m, num_slots) * -(-max_lora_rank // GROUP)


@triton.jit
def _list_columns(tile, route, columns, table, num_experts, slots_1, max_groups, FIRST_PROJ: tl.constexpr,
                  NUM_PROJ: tl.constexpr, B_STEP: tl.constexpr, BLOCK_M: tl.constexpr, ITEM_BYTES: tl.constexpr,
                  DIRECT: tl.constexpr):  # fmt: skip
    """Write the list of one base tile, for table columns FIRST_PROJ and, with NUM_PROJ 2, the next.

    B_STEP: rows of B from one output row to the next where gate and up share a pair.
    """
    valid, _, _, expert, start, count = base_tile(route, tile, num_experts, 1, True, DIRECT, "")
    if valid:
        m = tl.arange(0, BLOCK_M)
        row_mask = m < count
        bin_m = bin_of_rows(route, expert, start + m, row_mask, slots_1, DIRECT, "")
        if DIRECT > 0:
            before_m = tl.full([BLOCK_M], -1, tl.int32)
        else:
            before_m = tl.load(route.row_bin + start + m - 1, mask=row_mask & (m > 0), other=-1)
        slot_m = bin_m - expert * slots_1 - 1
        first_m = row_mask & (bin_m != before_m) & (slot_m >= 0)
        record_m = (slot_m * num_experts + expert) * 3 + FIRST_PROJ
        widest_m = tl.zeros([BLOCK_M], tl.int32)
        for p in tl.static_range(NUM_PROJ):
            widest_m = tl.maximum(widest_m, tl.load(table.lora_rank + record_m + p, mask=first_m, other=0))
        groups_m = (widest_m + _GROUP - 1) // _GROUP
        before_m = tl.cumsum(groups_m, 0) - groups_m
        tl.store(columns.num_groups + tile, tl.sum(groups_m, 0))
        if FIRST_PROJ == 0:
            gate_a = tl.load(table.a_address + record_m, mask=first_m, other=0)
            shared_m = gate_a == tl.load(table.a_address + record_m + 1, mask=first_m, other=0)
        else:
            shared_m = m < 0
        for p in tl.static_range(NUM_PROJ):
            rank_m = tl.load(table.lora_rank + record_m + p, mask=first_m, other=0)
            address_m = tl.load(table.b_address + record_m + p, mask=first_m, other=0)
            b_row_m = tl.where(shared_m, B_STEP, 1) * rank_m
            site_m = tl.where(shared_m, 0, p)
            for j in range(0, tl.max(groups_m, 0)):
                here = j < groups_m
                columns_m = tl.minimum(tl.maximum(rank_m - j * _GROUP, 0), _GROUP)
                high = b_row_m | (columns_m << 11) | (j << 16) | (site_m << 21)
                word = ((tile.to(tl.int64) * max_groups + before_m + j) * NUM_PROJ + p) * 2
                tl.store(columns.words + word, address_m + j * (_GROUP * ITEM_BYTES), mask=here)
                tl.store(columns.words + word + 1, bin_m.to(tl.int64) | (high.to(tl.int64) << 32), mask=here)


@triton.jit
def list_columns(pid, route, gate_up, down, table, num_tiles, num_experts, slots_1, max_groups, B_STEP: tl.constexpr,
                 BLOCK_M: tl.constexpr, ITEM_BYTES: tl.constexpr, DIRECT: tl.constexpr):  # fmt: skip
    """Program pid of 2 * num_tiles: the list of one base tile, first those of gate and up, then those of down.

    B_STEP: rows of B from one output row to the next where gate and up share a pair. ITEM_BYTES: of an element of B.
    """
    if pid < num_tiles:
        _list_columns(pid, route, gate_up, table, num_experts, slots_1, max_groups, 0, 2, B_STEP, BLOCK_M, ITEM_BYTES,
                      DIRECT)  # fmt: skip
    else:
        _list_columns(pid - num_tiles, route, down, table, num_experts, slots_1, max_groups, 2, 1, 1, BLOCK_M,
                      ITEM_BYTES, DIRECT)  # fmt: skip


@triton.jit
def list_of_tile(columns, table, tile, max_groups, NUM_PROJ: tl.constexpr):
    """(widest, words, count) that `add_listed_deltas` takes of a base tile; to be called long before it."""
    widest = tl.load(table.widest, cache_modifier=".cg")
    count = tl.load(columns.num_groups + tile, cache_modifier=".cg")
    words = columns.words + tile.to(tl.int64) * max_groups * (NUM_PROJ * 2)
    return widest, words, count


@triton.jit
def _step(acc, i, words, count, n, n_mask, rows_bin, s_row_ptrs, site_stride, PROJ: tl.constexpr,
          NUM_PROJ: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """acc + s B^T over the columns of step i. ALIGNED: every rank is a multiple of 8.

    So 8 neighbouring columns are 16 bytes of B and of s. A row meets only the columns of its own bin.
    """
    c = tl.arange(0, COLUMNS)
    group_c = i * (COLUMNS // _GROUP) + c // _GROUP
    inside_c = group_c < count
    word_ptrs = words + (group_c * NUM_PROJ + PROJ) * 2
    address_c = tl.load(word_ptrs, mask=inside_c, other=0)
    second_c = tl.load(word_ptrs + 1, mask=inside_c, other=0)
    high_c = (second_c >> 32).to(tl.int32)
    r_c = c % _GROUP
    ok = r_c < ((high_c >> 11) & 31)
    b_row_c = high_c & 2047
    if ALIGNED:
        ok = tl.max_constancy(ok, [8])
        b_row_c = (b_row_c // 8) * 8
        address_c = (address_c // 16) * 16
    b_ptrs = address_c.to(tl.pointer_type(DTYPE))[None, :] + n[:, None] * b_row_c[None, :] + r_c[None, :]
    own = (rows_bin[:, None] == second_c.to(tl.int32)[None, :]) & ok[None, :]
    s_offset_c = (high_c >> 21) * site_stride + ((high_c >> 16) & 31) * _GROUP + r_c
    s_ptrs = s_row_ptrs[:, None] + s_offset_c[None, :]
    if ALIGNED:
        b_ptrs = tl.max_contiguous(tl.multiple_of(b_ptrs, [1, 16]), [1, 8])
        s_ptrs = tl.max_contiguous(tl.multiple_of(s_ptrs, [1, 16]), [1, 8])
        own = tl.max_constancy(own, [1, 8])
    b_NC = tl.load(b_ptrs, mask=n_mask[:, None] & ok[None, :], other=0.0)
    s_MC = tl.load(s_ptrs, mask=own, other=0.0)
    return tl.dot(s_MC, tl.trans(b_NC), acc, input_precision="ieee")


@triton.jit
def add_listed_deltas(acc, acc_up, widest, words, count, n, n_mask, rows_bin, pos, s_ptr, num_rows, s_stride,
                      NUM_PROJ: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """(acc, acc_up) plus the deltas of a tile's list; with NUM_PROJ 1 acc_up is returned as it came.

    acc, acc_up: [M, N] fp32. widest: see KernelTable. words: the tile's part of Columns.words. rows_bin [M]: bin of
    each row, -1 past the tile's rows. COLUMNS: extra K columns of one step.
    """
    steps = (count * _GROUP + COLUMNS - 1) // COLUMNS
    s_row_ptrs = s_ptr + pos.to(tl.int64) * s_stride
    site_stride = num_rows.to(tl.int64) * s_stride
    if widest >= 0:
        # B and s are loaded a step ahead, the list, which says where they are, two.
        for i in tl.range(0, steps, num_stages=3):
            acc = _step(acc, i, words, count, n, n_mask, rows_bin, s_row_ptrs, site_stride, 0, NUM_PROJ, COLUMNS,
                        True, DTYPE)  # fmt: skip
            if NUM_PROJ == 2:
                acc_up = _step(acc_up, i, words, count, n, n_mask, rows_bin, s_row_ptrs, site_stride, 1, NUM_PROJ,
                               COLUMNS, True, DTYPE)  # fmt: skip
    else:
        for i in tl.range(0, steps, num_stages=1):
            acc = _step(acc, i, words, count, n, n_mask, rows_bin, s_row_ptrs, site_stride, 0, NUM_PROJ, COLUMNS,
                        False, DTYPE)  # fmt: skip
            if NUM_PROJ == 2:
                acc_up = _step(acc_up, i, words, count, n, n_mask, rows_bin, s_row_ptrs, site_stride, 1, NUM_PROJ,
                               COLUMNS, False, DTYPE)  # fmt: skip
    return acc, acc_up
