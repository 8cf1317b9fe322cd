"""LoRA deltas in the epilogue of a GEMM over base tiles: the adapters of a tile as extra K columns.

The ranks of several adapters sit side by side, so that a tile of many adapters takes few steps. The columns of other
adapters meet a row as exact zeros, so base rows keep their bits; adapters are finite by contract.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compute_worker.kernels.lora import expand

COLUMNS = tl.constexpr(64)
"""Extra K columns of one step: those of COLUMNS / BLOCK_R adapters."""


@triton.jit
def slots_of_tile(route, start, count, slots_1, DIRECT: tl.constexpr):
    """(first, last adapter slot) of a base tile; last -1 without any adapter."""
    if DIRECT > 0:
        last = tl.load(route.header).to(tl.int32)
        last = tl.where(last < slots_1 - 1, last, -1)
        first = last
    else:
        first = tl.load(route.row_bin + start) % slots_1 - 1
        last = tl.load(route.row_bin + start + count - 1) % slots_1 - 1
    return tl.maximum(first, 0), last


@triton.jit
def _step(acc, slot_c, last_slot, r0, expert, n, n_mask, rows_bin, pos, s_ptr, table, num_experts, slots_1, num_rows,
          s_stride, B_STEP: tl.constexpr, FIRST_PROJ: tl.constexpr, PROJ: tl.constexpr, BLOCK_R: tl.constexpr,
          DTYPE: tl.constexpr):  # fmt: skip
    """acc + s B^T over the ranks from r0 on of the adapters in slot_c [COLUMNS]; every rank is a multiple of 8.

    So 8 neighbouring columns are 16 bytes of B and of s. A row meets only the columns of its own bin.
    """
    record_c = (slot_c * num_experts + expert) * 3 + PROJ
    present_c = slot_c <= last_slot
    rank_c = tl.load(table.lora_rank + record_c, mask=present_c, other=0)
    address_c = tl.load(table.b_address + record_c, mask=present_c, other=0)
    rank_c = (rank_c // 8) * 8
    r_c = r0 + tl.arange(0, COLUMNS) % BLOCK_R
    ok = tl.max_constancy(r_c < rank_c, [8])
    b_row_c = rank_c
    site_c = tl.zeros([COLUMNS], tl.int32)
    if FIRST_PROJ == 0:
        gate_a = tl.load(table.a_address + record_c - PROJ, mask=present_c, other=0)
        up_a = tl.load(table.a_address + record_c - PROJ + 1, mask=present_c, other=0)
        b_row_c = tl.where(gate_a == up_a, B_STEP, 1) * rank_c
        if PROJ == 1:
            site_c = tl.where(gate_a == up_a, 0, 1)
    b = ((address_c // 16) * 16).to(tl.pointer_type(DTYPE))
    b_ptrs = b[None, :] + n[:, None] * b_row_c[None, :] + r_c[None, :]
    b_ptrs = tl.max_contiguous(tl.multiple_of(b_ptrs, [1, 16]), [1, 8])
    b_NC = tl.load(b_ptrs, mask=n_mask[:, None] & ok[None, :], other=0.0)
    own = (rows_bin[:, None] == (expert * slots_1 + slot_c + 1)[None, :]) & ok[None, :]
    s_row = site_c[None, :] * num_rows + pos[:, None]
    s_ptrs = s_ptr + s_row.to(tl.int64) * s_stride + r_c[None, :]
    s_ptrs = tl.max_contiguous(tl.multiple_of(s_ptrs, [1, 16]), [1, 8])
    s_MC = tl.load(s_ptrs, mask=tl.max_constancy(own, [1, 8]), other=0.0)
    return tl.dot(s_MC, tl.trans(b_NC), acc, input_precision="ieee")


@triton.jit
def _one_adapter(acc, slot, expert, n, n_mask, rows_bin, pos, s_ptr, table, num_experts, slots_1, num_rows, s_stride,
                 B_STEP: tl.constexpr, FIRST_PROJ: tl.constexpr, PROJ: tl.constexpr, BLOCK_R: tl.constexpr,
                 DTYPE: tl.constexpr):  # fmt: skip
    """acc plus the delta of one adapter of any rank."""
    record = (slot * num_experts + expert) * 3 + PROJ
    site = 0
    step = 1
    if FIRST_PROJ == 0:
        gate_a = tl.load(table.a_address + record - PROJ)
        up_a = tl.load(table.a_address + record - PROJ + 1)
        site = tl.where(gate_a == up_a, 0, PROJ)
        step = tl.where(gate_a == up_a, B_STEP, 1)
    s_row = (site * num_rows + pos).to(tl.int64) * s_stride
    own = rows_bin == expert * slots_1 + slot + 1
    return expand(acc, s_ptr + s_row, own, tl.load(table.b_address + record), n, step, n_mask,
                  tl.load(table.lora_rank + record), BLOCK_R, DTYPE)  # fmt: skip


@triton.jit
def add_deltas(acc, acc_up, widest, first_slot, last_slot, expert, n, n_mask, rows_bin, pos, s_ptr, table, num_experts,
               slots_1, num_rows, s_stride, B_STEP: tl.constexpr, FIRST_PROJ: tl.constexpr, NUM_PROJ: tl.constexpr,
               BLOCK_R: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """(acc, acc_up) plus the deltas of slots first_slot to last_slot: table column FIRST_PROJ, and the next for acc_up.

    acc, acc_up: [M, N] fp32; with NUM_PROJ 1 acc_up is returned as it came. rows_bin [M]: bin of each row, -1 past the
    tile's rows. widest: see KernelTable. B_STEP: rows of B from one column to the next where gate and up share a
    pair.
    """
    if widest >= 0:
        per_step: tl.constexpr = COLUMNS // BLOCK_R
        rank_steps = (widest + BLOCK_R - 1) // BLOCK_R
        slot_steps = (last_slot - first_slot + per_step) // per_step
        for i in tl.range(0, slot_steps * rank_steps, num_stages=2):
            slot_c = first_slot + (i // rank_steps) * per_step + tl.arange(0, COLUMNS) // BLOCK_R
            r0 = (i % rank_steps) * BLOCK_R
            acc = _step(acc, slot_c, last_slot, r0, expert, n, n_mask, rows_bin, pos, s_ptr, table, num_experts,
                        slots_1, num_rows, s_stride, B_STEP, FIRST_PROJ, FIRST_PROJ, BLOCK_R,
                        DTYPE)  # fmt: skip
            if NUM_PROJ == 2:
                acc_up = _step(acc_up, slot_c, last_slot, r0, expert, n, n_mask, rows_bin, pos, s_ptr, table,
                               num_experts, slots_1, num_rows, s_stride, B_STEP, FIRST_PROJ, FIRST_PROJ + 1, BLOCK_R,
                               DTYPE)  # fmt: skip
    else:
        for slot in range(first_slot, last_slot + 1):
            acc = _one_adapter(acc, slot, expert, n, n_mask, rows_bin, pos, s_ptr, table, num_experts, slots_1,
                               num_rows, s_stride, B_STEP, FIRST_PROJ, FIRST_PROJ, BLOCK_R, DTYPE)  # fmt: skip
            if NUM_PROJ == 2:
                acc_up = _one_adapter(acc_up, slot, expert, n, n_mask, rows_bin, pos, s_ptr, table, num_experts,
                                      slots_1, num_rows, s_stride, B_STEP, FIRST_PROJ, FIRST_PROJ + 1, BLOCK_R,
                                      DTYPE)  # fmt: skip
    return acc, acc_up
