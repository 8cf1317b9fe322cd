"""Weighted sum of each token's expert outputs, in the order of its k, with the down delta added on the way."""

from __future__ import annotations

import triton
import triton.language as tl

from compute_worker.kernels.lora import (
    NARROW_RANK,
    aligned_pointer,
    expand,
    let_next_launch,
    wait_for_data,
    wait_for_previous,
)
from compute_worker.kernels.tiles import pair_tile


@triton.jit
def _position(pos_ptrs, expert_ptrs, k, num_experts, DIRECT: tl.constexpr):
    """Position of a token's row k, -1 for a remote one. DIRECT: there is one token, whose rows keep their places."""
    if DIRECT > 0:
        expert = tl.load(expert_ptrs + k).to(tl.int32)
        pos = tl.where((expert >= 0) & (expert < num_experts), k, -1)
    else:
        pos = tl.load(pos_ptrs + k)
    return pos


@triton.jit
def _row_delta(pos_ptrs, weight_ptrs, expert_ptrs, s_ptr, table, k, slot, num_experts, s_stride, r, d, d_mask,
               ALIGNED: tl.constexpr, DTYPE: tl.constexpr, DIRECT: tl.constexpr):  # fmt: skip
    """[j, r] of weight * s[r] * B[d[j], r] of one row of a token."""
    pos = _position(pos_ptrs, expert_ptrs, k, num_experts, DIRECT)
    local = pos >= 0
    expert = tl.load(expert_ptrs + k).to(tl.int32)
    weight = tl.load(weight_ptrs + k).to(tl.float32)
    record = (slot * num_experts + expert) * 3 + 2
    lora_rank = tl.load(table.lora_rank + record, mask=local, other=0)
    address = tl.load(table.b_address + record, mask=local, other=0)
    if ALIGNED:
        lora_rank = (lora_rank // 8) * 8
        b = aligned_pointer(address, DTYPE)
    else:
        b = address.to(tl.pointer_type(DTYPE))
    r_mask = r < lora_rank
    s = tl.load(s_ptr + pos.to(tl.int64) * s_stride + r, mask=r_mask, other=0.0).to(tl.float32)
    b_ptrs = b + d[:, None] * lora_rank + r[None, :]
    b_DR = tl.load(b_ptrs, mask=d_mask[:, None] & r_mask[None, :], other=0.0).to(tl.float32)
    return b_DR * (s * weight)[None, :]


@triton.jit
def _any_ranks(pos_ptrs, weight_ptrs, expert_ptrs, s_ptr, table, slot, num_experts, s_stride, widest, d, d_mask,
               TOP_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, ALIGNED: tl.constexpr,
               DTYPE: tl.constexpr, DIRECT: tl.constexpr):  # fmt: skip
    """delta[j] = sum over k and r of weight_k * s_k[r] * B_k[d[j], r], rank block by rank block."""
    acc = tl.zeros([BLOCK_D, BLOCK_R], tl.float32)
    for r0 in tl.range(0, widest, BLOCK_R, num_stages=1):
        r = r0 + tl.arange(0, BLOCK_R)
        for k in tl.range(0, TOP_K, num_stages=1):
            acc += _row_delta(pos_ptrs, weight_ptrs, expert_ptrs, s_ptr, table, k, slot, num_experts, s_stride, r, d,
                              d_mask, ALIGNED, DTYPE, DIRECT)  # fmt: skip
    return tl.sum(acc, 1)


@triton.jit
def _weighted_sum(y_row_ptr, pos_ptrs, weight_ptrs, expert_ptrs, num_experts, d, d_mask, D: tl.constexpr,
                  TOP_K: tl.constexpr, BLOCK_D: tl.constexpr, DIRECT: tl.constexpr):  # fmt: skip
    """sum over k of weight_k * y_row[pos_k, d], fp32, k = 0 first; after the wait."""
    out = tl.zeros([BLOCK_D], tl.float32)
    for k in tl.static_range(TOP_K):
        pos = _position(pos_ptrs, expert_ptrs, k, num_experts, DIRECT)
        weight = tl.load(weight_ptrs + k).to(tl.float32)
        y = tl.load(y_row_ptr + pos.to(tl.int64) * D + d, mask=d_mask & (pos >= 0), other=0.0).to(tl.float32)
        out += y * tl.where(pos >= 0, weight, 0.0)
    return out


@triton.jit
def _with_delta(y_row_ptr, pos_ptrs, weight_ptrs, expert_ptrs, s_ptr, table, slot, num_experts, s_stride, pos_k,
                weight_k, rank_k, address_k, d_first, D: tl.constexpr, TOP_K: tl.constexpr, BLOCK_D: tl.constexpr,
                BLOCK_R: tl.constexpr, DIRECT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Columns d_first to d_first + BLOCK_D of one token, deltas included; waits for the GEMM when B is on its way.

    Where a rank is larger than BLOCK_R or no multiple of 8, the deltas are added block by block after the wait.
    """
    dtype: tl.constexpr = y_row_ptr.dtype.element_ty
    d = d_first + tl.arange(0, BLOCK_D)
    d_mask = d < D
    widest = tl.max(rank_k, 0)
    aligned = tl.max(rank_k % 8, 0) == 0
    fits = (widest <= BLOCK_R) & aligned
    rank_k = tl.where(fits, (rank_k // 8) * 8, 0)
    r = tl.arange(0, BLOCK_R)
    r_mask = tl.max_constancy(r[None, :] < rank_k[:, None], [1, 8])
    b_ptrs = aligned_pointer(address_k, dtype)[None, :, None] + d[:, None, None] * rank_k[None, :, None]
    b_ptrs = tl.max_contiguous(tl.multiple_of(b_ptrs + r[None, None, :], [1, 1, 16]), [1, 1, 8])
    b_DKR = tl.load(b_ptrs, mask=r_mask[None, :, :] & d_mask[:, None, None], other=0.0,
                    cache_modifier=".cg")  # fmt: skip
    wait_for_data(PDL)
    out = _weighted_sum(y_row_ptr, pos_ptrs, weight_ptrs, expert_ptrs, num_experts, d, d_mask, D, TOP_K, BLOCK_D,
                        DIRECT)  # fmt: skip
    s_ptrs = s_ptr + pos_k.to(tl.int64)[:, None] * s_stride + r[None, :]
    s_KR = tl.load(s_ptrs, mask=r_mask, other=0.0).to(tl.float32) * weight_k[:, None]
    delta = tl.sum(tl.sum(b_DKR.to(tl.float32) * s_KR[None, :, :], 1), 1)
    # Base rows keep their bits: nothing is added to them.
    out = tl.where(widest > 0, out + delta, out)
    if fits == 0:
        # Few registers are worth more than speed here.
        if aligned:
            out += _any_ranks(pos_ptrs, weight_ptrs, expert_ptrs, s_ptr, table, slot, num_experts, s_stride, widest, d,
                              d_mask, TOP_K, BLOCK_D, BLOCK_R, True, dtype, DIRECT)  # fmt: skip
        else:
            out += _any_ranks(pos_ptrs, weight_ptrs, expert_ptrs, s_ptr, table, slot, num_experts, s_stride, widest, d,
                              d_mask, TOP_K, BLOCK_D, BLOCK_R, False, dtype, DIRECT)  # fmt: skip
    return out, d, d_mask


@triton.jit
def _store(out_ptr, token, slot, num_slots, out, d, d_mask, D: tl.constexpr):
    """One token's columns d; NaN rather than a base answer for a slot that the table does not have."""
    out = tl.where(slot < num_slots, out, float("nan"))
    tl.store(out_ptr + token * D + d, out.to(out_ptr.dtype.element_ty), mask=d_mask)


@triton.jit(do_not_specialize=["num_experts", "num_slots"])
def combine_kernel(y_row_ptr, expert_ptr, weight_ptr, slot_ptr, out_ptr, s_ptr, row_pos_ptr, table, num_experts,
                   num_slots, s_stride, D: tl.constexpr, TOP_K: tl.constexpr, HAS_LORA: tl.constexpr,
                   BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, DIRECT: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    """y[t, d] = sum over k of weight[t, k] * (y_row[pos(t, k), d] + s2[pos(t, k)] B_down^T[d]).

    Remote rows (position -1) add nothing; a token without any local row gets zeros. A slot that the table does not have
    gives NaN rather than a base answer. fp32 sums, k = 0 first, whatever the block sizes. BLOCK_K: TOP_K or more, a
    power of two. Positions, table and B are read before the wait for the GEMM. Tokens without adapter, or with one of
    NARROW_RANK at most, take wider blocks of columns: the first programs do all of theirs.
    """
    let_next_launch(PDL)
    token = tl.program_id(0).to(tl.int64)
    row = token * TOP_K
    pos_ptrs = row_pos_ptr + row
    weight_ptrs = weight_ptr + row
    expert_ptrs = expert_ptr + row
    slot = tl.load(slot_ptr + token, cache_modifier=".cg").to(tl.int32)
    if HAS_LORA:
        k = tl.arange(0, BLOCK_K)
        inside = k < TOP_K
        expert_k = tl.load(expert_ptrs + k, mask=inside, other=-1, cache_modifier=".cg").to(tl.int32)
        if DIRECT > 0:
            pos_k = tl.where((expert_k >= 0) & (expert_k < num_experts), k, -1)
        else:
            pos_k = tl.load(pos_ptrs + k, mask=inside, other=-1, cache_modifier=".cg")
        weight_k = tl.load(weight_ptrs + k, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        record_k = (slot * num_experts + expert_k) * 3 + 2
        looks = (slot >= 0) & (slot < num_slots) & (pos_k >= 0)
        rank_k = tl.load(table.lora_rank + record_k, mask=looks, other=0, cache_modifier=".cg")
        address_k = tl.load(table.b_address + record_k, mask=looks, other=0, cache_modifier=".cg")
        if BLOCK_R > NARROW_RANK and tl.max(rank_k, 0) <= NARROW_RANK:
            WIDE_D: tl.constexpr = BLOCK_D * BLOCK_R // NARROW_RANK
            if tl.program_id(1) * WIDE_D < D:
                out, d, d_mask = _with_delta(y_row_ptr, pos_ptrs, weight_ptrs, expert_ptrs, s_ptr, table, slot,
                                             num_experts, s_stride, pos_k, weight_k, rank_k, address_k,
                                             tl.program_id(1) * WIDE_D, D, TOP_K, WIDE_D, NARROW_RANK, DIRECT,
                                             PDL)  # fmt: skip
                _store(out_ptr, token, slot, num_slots, out, d, d_mask, D)
            else:
                wait_for_data(PDL)
        else:
            out, d, d_mask = _with_delta(y_row_ptr, pos_ptrs, weight_ptrs, expert_ptrs, s_ptr, table, slot,
                                         num_experts, s_stride, pos_k, weight_k, rank_k, address_k,
                                         tl.program_id(1) * BLOCK_D, D, TOP_K, BLOCK_D, BLOCK_R, DIRECT,
                                         PDL)  # fmt: skip
            _store(out_ptr, token, slot, num_slots, out, d, d_mask, D)
    else:
        d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        d_mask = d < D
        wait_for_data(PDL)
        out = _weighted_sum(y_row_ptr, pos_ptrs, weight_ptrs, expert_ptrs, num_experts, d, d_mask, D, TOP_K, BLOCK_D,
                            DIRECT)  # fmt: skip
        _store(out_ptr, token, slot, num_slots, out, d, d_mask, D)


@triton.jit
def _down_in_one_block(y_row_ptr, s_ptrs, address, lora_rank, pos, row_mask, first, last, D: tl.constexpr,
                       BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """y_row[pos] += s B^T over columns first to last; the rank is a multiple of 8 and at most BLOCK_R."""
    dtype: tl.constexpr = y_row_ptr.dtype.element_ty
    stride = (lora_rank // 8) * 8
    r = tl.arange(0, BLOCK_R)
    r_mask = r < stride
    s = tl.load(s_ptrs[:, None] + r[None, :], mask=row_mask[:, None] & r_mask[None, :], other=0.0)
    b_row = aligned_pointer(address, dtype) + r[None, :]
    for d0 in tl.range(first, last, BLOCK_D, num_stages=STAGES):
        d = d0 + tl.arange(0, BLOCK_D)
        b_DR = tl.load(b_row + d[:, None] * stride, mask=(d < D)[:, None] & r_mask[None, :], other=0.0)
        y_ptrs = y_row_ptr + pos[:, None] * D + d[None, :]
        mask = row_mask[:, None] & (d < D)[None, :]
        y = tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32)
        y = tl.dot(s, tl.trans(b_DR), y, input_precision="ieee")
        tl.store(y_ptrs, y.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["num_experts", "slots_1"])
def expand_down_kernel(y_row_ptr, s_ptr, route, table, num_experts, slots_1, s_stride, D: tl.constexpr,
                       BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, SPAN_D: tl.constexpr, BLOCK_R: tl.constexpr,
                       STAGES: tl.constexpr, DIRECT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """y_row[pos] += s2[pos] B_down^T: one pair tile, SPAN_D columns a program; B is read once for its rows."""
    wait_for_previous(PDL)
    bin_id, start, count = pair_tile(route, tl.program_id(1), num_experts, slots_1, DIRECT, "")
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
                if BLOCK_R > NARROW_RANK and lora_rank <= NARROW_RANK:
                    _down_in_one_block(y_row_ptr, s_ptrs, address, lora_rank, pos, row_mask, first, last, D, BLOCK_D,
                                       NARROW_RANK, STAGES)  # fmt: skip
                else:
                    _down_in_one_block(y_row_ptr, s_ptrs, address, lora_rank, pos, row_mask, first, last, D, BLOCK_D,
                                       BLOCK_R, STAGES)  # fmt: skip
        else:
            for d0 in range(first, last, BLOCK_D):
                d = d0 + tl.arange(0, BLOCK_D)
                y_ptrs = y_row_ptr + pos[:, None] * D + d[None, :]
                mask = row_mask[:, None] & (d < D)[None, :]
                y = tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32)
                y = expand(y, s_ptrs, row_mask, address, d, 1, d < D, lora_rank, BLOCK_R, dtype)
                tl.store(y_ptrs, y.to(dtype), mask=mask)
