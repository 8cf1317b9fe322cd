"""Weighted sum of each token's expert outputs, in the order of its k, with the down delta added on the way."""

from __future__ import annotations

import triton
import triton.language as tl

from compute_worker.kernels.lora import aligned_pointer, expand, wait_for_previous
from compute_worker.kernels.tiles import pair_tile


@triton.jit
def _position(row_pos_ptr, expert_ptr, row, num_experts, DIRECT: tl.constexpr):
    """Position of a row, -1 for a remote one."""
    if DIRECT > 0:
        expert = tl.load(expert_ptr + row)
        pos = tl.where((expert >= 0) & (expert < num_experts), row, -1)
    else:
        pos = tl.load(row_pos_ptr + row)
    return pos


@triton.jit
def _expand_rows(acc, row_pos_ptr, expert_ptr, weight_ptr, s_ptr, table, row, slot, num_experts, s_stride, max_rank, d,
                 d_mask, TOP_K: tl.constexpr, BLOCK_R: tl.constexpr, ALIGNED: tl.constexpr, DTYPE: tl.constexpr,
                 DIRECT: tl.constexpr):  # fmt: skip
    """acc[j, r] + sum over k of weight_k * s_k[r] * B_k[d[j], r]; the caller sums over r.

    The k loop is unrolled and branch-free, so that the loads of all experts are in flight together.
    """
    r = tl.arange(0, BLOCK_R)
    for r0 in tl.range(0, max_rank, BLOCK_R, num_stages=1):
        for k in tl.static_range(TOP_K):
            pos = _position(row_pos_ptr, expert_ptr, row + k, num_experts, DIRECT)
            local = pos >= 0
            weight = tl.load(weight_ptr + row + k).to(tl.float32)
            expert = tl.load(expert_ptr + row + k).to(tl.int32)
            record = (slot * num_experts + expert) * 3 + 2
            lora_rank = tl.load(table.lora_rank + record, mask=local, other=0)
            address = tl.load(table.b_address + record, mask=local, other=0)
            if ALIGNED:
                lora_rank = (lora_rank // 8) * 8
                b = aligned_pointer(address, DTYPE)
            else:
                b = address.to(tl.pointer_type(DTYPE))
            r_mask = (r0 + r) < lora_rank
            s = tl.load(s_ptr + pos.to(tl.int64) * s_stride + r0 + r, mask=r_mask, other=0.0).to(tl.float32)
            b_ptrs = b + d[:, None] * lora_rank + (r0 + r)[None, :]
            b_DR = tl.load(b_ptrs, mask=d_mask[:, None] & r_mask[None, :], other=0.0).to(tl.float32)
            acc += b_DR * (s * weight)[None, :]
    return acc


@triton.jit(do_not_specialize=["num_experts", "num_slots"])
def combine_kernel(y_row_ptr, expert_ptr, weight_ptr, slot_ptr, out_ptr, s_ptr, row_pos_ptr, table, num_experts,
                   num_slots, s_stride, D: tl.constexpr, TOP_K: tl.constexpr, HAS_LORA: tl.constexpr,
                   BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, DIRECT: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    """y[t, d] = sum over k of weight[t, k] * (y_row[pos(t, k), d] + s2[pos(t, k)] B_down^T[d]).

    Remote rows (position -1) add nothing; a token without any local row gets zeros. A slot that the table does not have
    gives NaN rather than a base answer. fp32 sums, k = 0 first, whatever the block sizes.
    """
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    d_mask = d < D
    row = token * TOP_K
    slot = tl.load(slot_ptr + token).to(tl.int32)
    out = tl.zeros([BLOCK_D], tl.float32)
    for k in tl.static_range(TOP_K):
        pos = _position(row_pos_ptr, expert_ptr, row + k, num_experts, DIRECT)
        weight = tl.load(weight_ptr + row + k).to(tl.float32)
        y = tl.load(y_row_ptr + pos.to(tl.int64) * D + d, mask=d_mask & (pos >= 0), other=0.0).to(tl.float32)
        out += y * tl.where(pos >= 0, weight, 0.0)
    if HAS_LORA:
        if (slot >= 0) & (slot < num_slots):
            dtype: tl.constexpr = y_row_ptr.dtype.element_ty
            max_rank = 0
            odd = 0
            for k in tl.static_range(TOP_K):
                expert = tl.load(expert_ptr + row + k).to(tl.int32)
                record = (slot * num_experts + expert) * 3 + 2
                lora_rank = tl.load(table.lora_rank + record, mask=expert >= 0, other=0)
                max_rank = tl.maximum(max_rank, lora_rank)
                odd += lora_rank % 8
            acc = tl.zeros([BLOCK_D, BLOCK_R], tl.float32)
            if odd == 0:
                acc = _expand_rows(acc, row_pos_ptr, expert_ptr, weight_ptr, s_ptr, table, row, slot, num_experts,
                                   s_stride, max_rank, d, d_mask, TOP_K, BLOCK_R, True, dtype, DIRECT)  # fmt: skip
            else:
                acc = _expand_rows(acc, row_pos_ptr, expert_ptr, weight_ptr, s_ptr, table, row, slot, num_experts,
                                   s_stride, max_rank, d, d_mask, TOP_K, BLOCK_R, False, dtype, DIRECT)  # fmt: skip
            out += tl.sum(acc, 1)
    out = tl.where(slot < num_slots, out, float("nan"))
    tl.store(out_ptr + token * D + d, out.to(out_ptr.dtype.element_ty), mask=d_mask)


@triton.jit(do_not_specialize=["num_experts", "slots_1"])
def expand_down_kernel(y_row_ptr, s_ptr, route, table, num_experts, slots_1, s_stride, D: tl.constexpr,
                       BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, SPAN_D: tl.constexpr, BLOCK_R: tl.constexpr,
                       STAGES: tl.constexpr, DIRECT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """y_row[pos] += s2[pos] B_down^T: one pair tile, SPAN_D columns a program; B is read once for its rows."""
    wait_for_previous(PDL)
    bin_id, start, count = pair_tile(route, tl.program_id(1), num_experts, slots_1, DIRECT)
    slot = bin_id % slots_1 - 1
    if (count > 0) & (slot >= 0):
        record = (slot * num_experts + bin_id // slots_1) * 3 + 2
        lora_rank = tl.load(table.lora_rank + record)
        address = tl.load(table.b_address + record)
        dtype: tl.constexpr = y_row_ptr.dtype.element_ty
        m = tl.arange(0, BLOCK_M)
        row_mask = m < count
        pos = (start + m).to(tl.int64)
        s_ptrs = s_ptr + pos * s_stride
        first = tl.program_id(0) * SPAN_D
        last = tl.minimum(first + SPAN_D, D)
        if (lora_rank % 8 == 0) & (lora_rank <= BLOCK_R):
            if lora_rank > 0:
                r = tl.arange(0, BLOCK_R)
                r_mask = r < lora_rank
                s = tl.load(s_ptrs[:, None] + r[None, :], mask=row_mask[:, None] & r_mask[None, :], other=0.0)
                b_row = aligned_pointer(address, dtype) + r[None, :]
                stride = (lora_rank // 8) * 8
                for d0 in tl.range(first, last, BLOCK_D, num_stages=STAGES):
                    d = d0 + tl.arange(0, BLOCK_D)
                    b_DR = tl.load(b_row + d[:, None] * stride, mask=(d < D)[:, None] & r_mask[None, :], other=0.0)
                    y_ptrs = y_row_ptr + pos[:, None] * D + d[None, :]
                    mask = row_mask[:, None] & (d < D)[None, :]
                    y = tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32)
                    y = tl.dot(s, tl.trans(b_DR), y, input_precision="ieee")
                    tl.store(y_ptrs, y.to(dtype), mask=mask)
        else:
            for d0 in range(first, last, BLOCK_D):
                d = d0 + tl.arange(0, BLOCK_D)
                y_ptrs = y_row_ptr + pos[:, None] * D + d[None, :]
                mask = row_mask[:, None] & (d < D)[None, :]
                y = tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32)
                y = expand(y, s_ptrs, row_mask, address, d, 1, d < D, lora_rank, BLOCK_R, dtype)
                tl.store(y_ptrs, y.to(dtype), mask=mask)
