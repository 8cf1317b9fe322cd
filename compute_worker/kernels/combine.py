"""Weighted sum of each token's expert outputs, in the fixed order of its k, with the down delta added on the way."""

from __future__ import annotations

import triton
import triton.language as tl

from compute_worker.kernels.lora import aligned_pointer, expand


@triton.jit
def _expand_rows(s_ptrs, has_pair, b, n, n_mask, lora_rank, K_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
                 BLOCK_R: tl.constexpr):  # fmt: skip
    """delta[k, j] = sum over r of s[k, r] * B_k[n[j], r]: one row for each k, each with its own B and rank."""
    delta = tl.zeros([K_PAD, BLOCK_N], tl.float32)
    r = tl.arange(0, BLOCK_R)
    for r0 in tl.range(0, tl.max(lora_rank, 0), BLOCK_R, num_stages=1):
        s_mask = has_pair[:, None] & ((r0 + r)[None, :] < lora_rank[:, None])
        s = tl.load(s_ptrs[:, None] + (r0 + r)[None, :], mask=s_mask, other=0.0).to(tl.float32)
        b_ptrs = b[:, None, None] + n[None, :, None] * lora_rank[:, None, None] + (r0 + r)[None, None, :]
        b_KNR = tl.load(b_ptrs, mask=s_mask[:, None, :] & n_mask[None, :, None], other=0.0).to(tl.float32)
        delta += tl.sum(b_KNR * s[:, None, :], 2)
    return delta


@triton.jit(do_not_specialize=["num_experts", "num_slots"])
def combine_kernel(y_row_ptr, expert_ptr, weight_ptr, slot_ptr, out_ptr, s_ptr, row_pos_ptr, table, num_experts,
                   num_slots, s_stride, D: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr,
                   HAS_LORA: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr):  # fmt: skip
    """y[t, d] = sum over k of weight[t, k] * (y_row[pos(t, k), d] + scale * s2[pos(t, k)] B_down^T[d]).

    Remote rows (position -1) add nothing; a token without any local row gets zeros. A slot
    that the table does not have gives NaN rather than a base answer. fp32 sums.
    """
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    d_mask = d < D
    k = tl.arange(0, K_PAD)
    row = token * TOP_K + k
    pos = tl.load(row_pos_ptr + row, mask=k < TOP_K, other=-1)
    local = pos >= 0
    weight = tl.load(weight_ptr + row, mask=local, other=0.0).to(tl.float32)
    y_ptrs = y_row_ptr + pos.to(tl.int64)[:, None] * D + d[None, :]
    y = tl.load(y_ptrs, mask=local[:, None] & d_mask[None, :], other=0.0).to(tl.float32)
    out = tl.sum(y * weight[:, None], 0)
    slot = tl.load(slot_ptr + token).to(tl.int32)
    if HAS_LORA:
        if (slot >= 0) & (slot < num_slots):
            expert = tl.load(expert_ptr + row, mask=local, other=0).to(tl.int32)
            record = (slot * num_experts + expert) * 3 + 2
            lora_rank = tl.load(table.lora_rank + record, mask=local, other=0)
            has_pair = lora_rank > 0
            b_address = tl.load(table.b_address + record, mask=has_pair, other=0)
            scale = tl.load(table.scale + record, mask=has_pair, other=0.0)
            s_ptrs = s_ptr + pos.to(tl.int64) * s_stride
            dtype: tl.constexpr = y_row_ptr.dtype.element_ty
            if tl.max(lora_rank % 8, 0) == 0:
                delta = _expand_rows(s_ptrs, has_pair, aligned_pointer(b_address, dtype), d, d_mask,
                                     (lora_rank // 8) * 8, K_PAD, BLOCK_D, BLOCK_R)  # fmt: skip
            else:
                delta = _expand_rows(s_ptrs, has_pair, b_address.to(tl.pointer_type(dtype)), d, d_mask, lora_rank,
                                     K_PAD, BLOCK_D, BLOCK_R)  # fmt: skip
            out += tl.sum(delta * (weight * scale)[:, None], 0)
    out = tl.where(slot < num_slots, out, float("nan"))
    tl.store(out_ptr + token * D + d, out.to(out_ptr.dtype.element_ty), mask=d_mask)


@triton.jit(do_not_specialize=["num_experts", "slots_1"])
def expand_down_kernel(y_row_ptr, s_ptr, route, table, num_experts, slots_1, s_stride, D: tl.constexpr,
                       BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr):  # fmt: skip
    """y_row[pos] += scale * s2[pos] B_down^T, one pair tile a program: each B is read once for all rows of its pair."""
    entry = tl.program_id(1)
    if entry < tl.load(route.header + 1):
        count = tl.load(route.pair_count + entry)
        bin_id = tl.load(route.pair_bin + entry)
        slot = bin_id % slots_1 - 1
        if count > 0 and slot >= 0:
            record = (slot * num_experts + bin_id // slots_1) * 3 + 2
            lora_rank = tl.load(table.lora_rank + record)
            if lora_rank > 0:
                m = tl.arange(0, BLOCK_M)
                row_mask = m < count
                pos = (tl.load(route.pair_start + entry) + m).to(tl.int64)
                d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
                d_mask = d < D
                y_ptrs = y_row_ptr + pos[:, None] * D + d[None, :]
                mask = row_mask[:, None] & d_mask[None, :]
                y = tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32)
                delta = expand(s_ptr + pos * s_stride, row_mask, tl.load(table.b_address + record), d, 1, d_mask,
                               lora_rank, BLOCK_M, BLOCK_D, BLOCK_R, y_row_ptr.dtype.element_ty)  # fmt: skip
                y += delta * tl.load(table.scale + record)
                tl.store(y_ptrs, y.to(y_row_ptr.dtype.element_ty), mask=mask)
