"""The two halves of a LoRA delta as device functions: shrink (x A^T) and expand (s B^T).

A and B are read where the adapter lies, by absolute address. An address and a rank come out of a table, so the
compiler knows nothing of their alignment; where the rank is a multiple of 8 every A row and B row starts at a multiple
of 16 bytes, and the aligned branch says so by rounding both numbers (a no-op there), which makes the loads 16 bytes
wide. Other ranks take the other branch and narrow loads of B.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def aligned_pointer(address, DTYPE: tl.constexpr):
    """The address as a pointer that the compiler knows to be 16-byte aligned; the address must be."""
    return tl.multiple_of(((address // 16) * 16).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Under programmatic dependent launch: let the next kernel launch, then wait for the data of the one before."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _expand_loop(acc, s_ptrs, row_mask, b, b_row, b_step, n_mask, lora_rank, BLOCK_R: tl.constexpr):
    r = tl.arange(0, BLOCK_R)
    for r0 in tl.range(0, lora_rank, BLOCK_R, num_stages=1):
        r_mask = (r0 + r) < lora_rank
        s = tl.load(s_ptrs[:, None] + (r0 + r)[None, :], mask=row_mask[:, None] & r_mask[None, :], other=0.0)
        b_ptrs = b + b_row[:, None] * (b_step * lora_rank) + (r0 + r)[None, :]
        b_NR = tl.load(b_ptrs, mask=n_mask[:, None] & r_mask[None, :], other=0.0)
        acc = tl.dot(s, tl.trans(b_NR), acc, input_precision="ieee")
    return acc


@triton.jit
def expand(acc, s_ptrs, row_mask, b_address, b_row, b_step, n_mask, lora_rank, BLOCK_R: tl.constexpr,
           DTYPE: tl.constexpr):  # fmt: skip
    """acc[m, j] + sum over r of s[m, r] * B[b_row[j], r], fp32; s is the scaled shrink result.

    s_ptrs: [M] start of each row's shrink result; b_step: rows of B from one b_row to the next (2 where gate and up
    rows alternate in one B). Masked rows and ranks past lora_rank count as zero.
    """
    if lora_rank % 8 == 0:
        b = aligned_pointer(b_address, DTYPE)
        acc = _expand_loop(acc, s_ptrs, row_mask, b, b_row, b_step, n_mask, (lora_rank // 8) * 8, BLOCK_R)
    else:
        b = b_address.to(tl.pointer_type(DTYPE))
        acc = _expand_loop(acc, s_ptrs, row_mask, b, b_row, b_step, n_mask, lora_rank, BLOCK_R)
    return acc


@triton.jit
def shrink(x_ptrs, row_mask, s_ptrs, a_address, lora_rank, scale, K: tl.constexpr, BLOCK_M: tl.constexpr,
           BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """s[m, r] = scale * sum over k of x[m, k] * A[r, k] for r < lora_rank: fp32, rounded once to the model's dtype.

    x_ptrs, s_ptrs: [BLOCK_M] start of each row; A [lora_rank, K] row-major, always 16-byte aligned (K is).
    """
    a = aligned_pointer(a_address, DTYPE)
    r = tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    for r0 in range(0, lora_rank, BLOCK_R):
        r_mask = (r0 + r) < lora_rank
        acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            if K % BLOCK_K == 0:
                x = tl.load(x_ptrs[:, None] + (k0 + k)[None, :], mask=row_mask[:, None], other=0.0)
                a_RK = tl.load(a + (r0 + r)[:, None] * K + (k0 + k)[None, :], mask=r_mask[:, None], other=0.0)
            else:
                k_mask = (k0 + k)[None, :] < K
                x = tl.load(x_ptrs[:, None] + (k0 + k)[None, :], mask=row_mask[:, None] & k_mask, other=0.0)
                a_RK = tl.load(a + (r0 + r)[:, None] * K + (k0 + k)[None, :], mask=r_mask[:, None] & k_mask, other=0.0)
            acc = tl.dot(x, tl.trans(a_RK), acc, input_precision="ieee")
        tl.store(s_ptrs[:, None] + (r0 + r)[None, :], (acc * scale).to(DTYPE), mask=row_mask[:, None] & r_mask[None, :])


@triton.jit
def shrink_tile(entry, proj, x_ptr, s_ptr, route, table, num_experts, slots_1, num_rows, s_stride,
                K: tl.constexpr, TOP_K: tl.constexpr, FIRST_PROJ: tl.constexpr, BLOCK_M: tl.constexpr,
                BLOCK_K: tl.constexpr,
                BLOCK_R: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Shrink one pair tile for table column FIRST_PROJ + proj; nothing to do for base rows or absent pairs.

    x is indexed by token where TOP_K > 0 and by position otherwise; s is [projections, num_rows, s_stride].
    """
    num_entries = tl.load(route.header + 1)
    count = tl.load(route.pair_count + entry)
    bin_id = tl.load(route.pair_bin + entry)
    start = tl.load(route.pair_start + entry)
    slot = bin_id % slots_1 - 1
    if (entry < num_entries) & (count > 0) & (slot >= 0):
        record = (slot * num_experts + bin_id // slots_1) * 3 + FIRST_PROJ + proj
        m = tl.arange(0, BLOCK_M)
        row_mask = m < count
        pos = start + m
        if TOP_K > 0:
            x_row = tl.load(route.sorted_row + pos, mask=row_mask, other=0) // TOP_K
        else:
            x_row = pos
        lora_rank = tl.load(table.lora_rank + record)
        a_address = tl.load(table.a_address + record)
        scale = tl.load(table.scale + record)
        # Gate and up with one A: the gate's shrink serves both.
        shared = (proj == 1) & (tl.load(table.a_address + record - proj) == a_address)
        if (lora_rank > 0) & (shared == 0):
            s_row = (proj * num_rows + pos).to(tl.int64) * s_stride
            shrink(x_ptr + x_row.to(tl.int64) * K, row_mask, s_ptr + s_row, a_address, lora_rank, scale, K, BLOCK_M,
                   BLOCK_K, BLOCK_R, STAGES, x_ptr.dtype.element_ty)  # fmt: skip
