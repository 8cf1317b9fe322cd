"""The two halves of a LoRA delta as device functions: shrink (x A^T) and expand (s B^T).

A and B are read where the adapter lies, by absolute address. An address and a rank come out of a table, so the
compiler knows nothing of their alignment; where the rank is a multiple of 8 every A row and B row starts at a multiple
of 16 bytes, and the aligned branch says so by rounding both numbers (a no-op there), which makes the loads 16 bytes
wide. Other ranks take the other branch and narrow loads of B.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compute_worker.kernels.tiles import gathered_row, pair_tile

NARROW_RANK = tl.constexpr(16)
"""Adapters of this rank and less have rank blocks of their own in a table of wider ones."""
NARROW_COLUMNS = tl.constexpr(32)
"""Gate and up of such an adapter side by side."""


@triton.jit
def aligned_pointer(address, DTYPE: tl.constexpr):
    """The address as a pointer that the compiler knows to be 16-byte aligned; the address must be."""
    return tl.multiple_of(((address // 16) * 16).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def let_next_launch(PDL: tl.constexpr):
    """Under programmatic dependent launch: the next kernel may launch once all programs of this one have come here."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def let_next_launch_and_see(PDL: tl.constexpr):
    """As `let_next_launch`; what this program has stored is seen, past the first-level cache, by what launches then."""
    if PDL:
        tl.debug_barrier()
        tl.inline_asm_elementwise("fence.acq_rel.gpu; mov.u32 $0, $1;", "=r,r", [tl.arange(0, 128)], dtype=tl.int32,
                                  is_pure=False, pack=1)  # fmt: skip
        tl.debug_barrier()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_data(PDL: tl.constexpr):
    """Under programmatic dependent launch: wait until the kernel before has ended. Every program must, but for
    those that wait for all that they read in another way (`first_tiles`).

    Where that kernel let this one launch only after its own wait, all kernels before it have ended without a wait. What
    they wrote is then read past the first-level cache (".cg"), which may hold what stood there in an earlier step.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """let_next_launch, then wait_for_data."""
    let_next_launch(PDL)
    wait_for_data(PDL)


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
def _shrink_loop(acc, x_row_ptrs, row_mask, a_row_ptrs, c_mask, k_first, k_end, K: tl.constexpr, BLOCK_K: tl.constexpr,
                 STAGES: tl.constexpr):  # fmt: skip
    k = tl.arange(0, BLOCK_K)
    for k0 in tl.range(k_first, k_end, BLOCK_K, num_stages=STAGES):
        x_mask, a_mask = row_mask[:, None], c_mask[:, None]
        if K % BLOCK_K != 0:
            x_mask = x_mask & ((k0 + k)[None, :] < K)
            a_mask = a_mask & ((k0 + k)[None, :] < K)
        x = tl.load(x_row_ptrs[:, None] + (k0 + k)[None, :], mask=x_mask, other=0.0)
        a_ptrs = tl.max_contiguous(tl.multiple_of(a_row_ptrs[:, None] + (k0 + k)[None, :], [1, 16]), [1, BLOCK_K])
        a_CK = tl.load(a_ptrs, mask=a_mask, other=0.0)
        acc = tl.dot(x, tl.trans(a_CK), acc, input_precision="ieee")
    return acc


@triton.jit
def _shrunk(is_up, pos, r, num_rows, s_stride):
    """Offsets into s [projections, num_rows, s_stride] of rows pos [M] and columns (is_up, r) [C]."""
    return (is_up.to(tl.int32)[None, :] * num_rows + pos[:, None]).to(tl.int64) * s_stride + r[None, :]


@triton.jit
def _shrink_columns(x_row_ptrs, s_ptr, partial_ptr, done_ptr, pos, row_mask, first, num_columns, lora_rank, address,
                    up_address, scale, up_scale, split, num_rows, s_stride, K: tl.constexpr, NUM_PROJ: tl.constexpr,
                    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, STEP_C: tl.constexpr,
                    SPLITS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Columns first to first + BLOCK_C, and from there by STEP_C, of a pair tile; see `shrink_tile`."""
    dtype: tl.constexpr = s_ptr.dtype.element_ty
    SPAN_K: tl.constexpr = ((K + SPLITS - 1) // SPLITS + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    k_first = split * SPAN_K
    k_end = tl.minimum(k_first + SPAN_K, K)
    for c0 in range(first, num_columns, STEP_C):
        c = c0 + tl.arange(0, BLOCK_C)
        is_up = c >= lora_rank
        r = c - tl.where(is_up, lora_rank, 0)
        a = ((tl.where(is_up, up_address, address) // 16) * 16).to(tl.pointer_type(dtype))
        acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
        acc = _shrink_loop(acc, x_row_ptrs, row_mask, a + r.to(tl.int64) * K, c < num_columns, k_first, k_end, K,
                           BLOCK_K, STAGES)  # fmt: skip
        mask = row_mask[:, None] & (c < num_columns)[None, :]
        offsets = _shrunk(is_up, pos, r, num_rows, s_stride)
        if SPLITS == 1:
            scaled = acc * tl.where(is_up, up_scale, scale)[None, :]
            tl.store(s_ptr + offsets, scaled.to(dtype), mask=mask)
        else:
            rows = (split * NUM_PROJ * num_rows).to(tl.int64) * s_stride
            tl.store(partial_ptr + rows + offsets, acc, mask=mask)
    if SPLITS > 1:
        tl.debug_barrier()
        arrived = tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            # Few columns at a time: the parts of a wide tile do not fit a thread's registers.
            SUM_C: tl.constexpr = min(BLOCK_C, 32)
            for c0 in range(first, num_columns, SUM_C):
                c = c0 + tl.arange(0, SUM_C)
                is_up = c >= lora_rank
                r = c - tl.where(is_up, lora_rank, 0)
                mask = row_mask[:, None] & (c < num_columns)[None, :]
                offsets = _shrunk(is_up, pos, r, num_rows, s_stride)
                acc = tl.zeros([BLOCK_M, SUM_C], tl.float32)
                for i in tl.static_range(SPLITS):
                    rows = (i * NUM_PROJ * num_rows).to(tl.int64) * s_stride
                    acc += tl.load(partial_ptr + rows + offsets, mask=mask, other=0.0, cache_modifier=".cg")
                scaled = acc * tl.where(is_up, up_scale, scale)[None, :]
                tl.store(s_ptr + offsets, scaled.to(dtype), mask=mask)
            tl.store(done_ptr, 0)


@triton.jit
def shrink_tile(pid, x_ptr, s_ptr, partial_ptr, route, table, num_experts, slots_1, num_rows, s_stride,
                K: tl.constexpr, TOP_K: tl.constexpr, FIRST_PROJ: tl.constexpr, NUM_PROJ: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, NARROW_BLOCK_K: tl.constexpr,
                BLOCK_R: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, DIRECT: tl.constexpr):  # fmt: skip
    """s[proj, pos, r] = scale * sum over k of x[row, k] * A_proj[r, k] for one pair tile.

    The A of the NUM_PROJ table columns stand side by side, BLOCK_C of their rows a program, so that x is read once for
    several, as many columns as their own ranks make: of a narrow adapter in a table of wide ones, gate and up are one
    program's, with NARROW_BLOCK_K instead of BLOCK_K. Where gate and up are the same A only the gate's result is
    written. x is indexed by token where TOP_K > 0 and by position otherwise; s is [projections, num_rows, s_stride],
    fp32 sums rounded once to the model's dtype. A is [lora_rank, K] row-major, 16-byte aligned (K is).
    SPLITS > 1 (with all columns in one program): so many programs share K; each leaves its fp32 sums in partial
    [SPLITS, projections, num_rows, s_stride], and the last to arrive adds them, in their order, whichever it is.
    """
    PARTS: tl.constexpr = NUM_PROJ * BLOCK_R // BLOCK_C
    entry = pid // (PARTS * SPLITS)
    part = pid // SPLITS % PARTS
    split = pid % SPLITS
    bin_id, start, count = pair_tile(route, entry, num_experts, slots_1, DIRECT, "")
    slot = bin_id % slots_1 - 1
    if (count > 0) & (slot >= 0):
        record = (slot * num_experts + bin_id // slots_1) * 3 + FIRST_PROJ
        m = tl.arange(0, BLOCK_M)
        row_mask = m < count
        pos = start + m
        lora_rank = tl.load(table.lora_rank + record)
        address = tl.load(table.a_address + record)
        scale = tl.load(table.scale + record)
        num_columns = lora_rank
        up_address = address
        up_scale = scale
        if NUM_PROJ == 2:
            up_address = tl.load(table.a_address + record + 1)
            up_scale = tl.load(table.scale + record + 1)
            num_columns += tl.where(up_address == address, 0, tl.load(table.lora_rank + record + 1))
        x_row_ptrs = x_ptr + gathered_row(route, pos, row_mask, TOP_K, DIRECT) * K
        done_ptr = route.pair_done + entry
        if PARTS == 1 and BLOCK_C > NARROW_COLUMNS and num_columns <= NARROW_COLUMNS:
            _shrink_columns(x_row_ptrs, s_ptr, partial_ptr, done_ptr, pos, row_mask, 0, num_columns, lora_rank,
                            address, up_address, scale, up_scale, split, num_rows, s_stride, K, NUM_PROJ, BLOCK_M,
                            NARROW_COLUMNS, NARROW_BLOCK_K, NARROW_COLUMNS, SPLITS, STAGES)  # fmt: skip
        else:
            _shrink_columns(x_row_ptrs, s_ptr, partial_ptr, done_ptr, pos, row_mask, part * BLOCK_C, num_columns,
                            lora_rank, address, up_address, scale, up_scale, split, num_rows, s_stride, K, NUM_PROJ,
                            BLOCK_M, BLOCK_C, BLOCK_K, PARTS * BLOCK_C, SPLITS, STAGES)  # fmt: skip
