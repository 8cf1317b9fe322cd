"""The two expert GEMMs over base tiles, with room for LoRA work in the same launch.

`expert_gemm_kernel` computes out[pos] = x[row] @ W[expert]^T. Its grid may start with shrink tiles: they read the same
rows but other weights, so their bytes share the memory stream of the base weights. Its epilogue may add expanded deltas
(EXPAND_PROJ), the adapters of the tile side by side as extra K columns.
`gate_up_act_kernel` computes gate and up columns side by side, adds their deltas and stores only the activation.
`shrink_kernel` is the shrink alone, for the fused path, where it must finish before the GEMM starts.

Base results do not depend on adapters: the K order of every sum is fixed by the tile shape, and the shrink results of
other rows are masked to zero before they meet an adapter's B.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compute_worker.kernels.activation import activate
from compute_worker.kernels.lora import expand, shrink_tile, wait_for_previous


@triton.jit
def _base_tile(route, index, NUM_N_BLOCKS: tl.constexpr, N_FASTEST: tl.constexpr):
    """(is there a tile, tile, n block) of a program.

    N_FASTEST: programs that run together share rows of x; else (all tiles of one n block are neighbours) they share
    weights where an expert has several tiles. Either way the programs without a tile come last.
    """
    num_tiles = tl.load(route.header)
    valid = index < num_tiles * NUM_N_BLOCKS
    if N_FASTEST:
        tile = index // NUM_N_BLOCKS
        n_block = index % NUM_N_BLOCKS
    else:
        n_block = index // tl.maximum(num_tiles, 1)
        tile = index - n_block * num_tiles
    return valid, tile, n_block


@triton.jit
def _gathered_row(route, pos, row_mask, TOP_K: tl.constexpr):
    """Row of x: the token of the position's row, or the position itself where TOP_K is 0; int64."""
    if TOP_K > 0:
        x_row = tl.load(route.sorted_row + pos, mask=row_mask, other=0) // TOP_K
    else:
        x_row = pos
    return x_row.to(tl.int64)


@triton.jit
def _column_step(acc, lora_rank, address, b_step, site, r0, bin_c, rows_bin, row_ok, pos, n, n_mask, s_ptr, num_rows,
                 s_stride, BLOCK_R: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """One extra K step: ranks r0 to r0 + BLOCK_R of COLUMNS / BLOCK_R adapters side by side.

    lora_rank, address, b_step, site, bin_c: [COLUMNS], equal within an adapter's columns; every rank a multiple of 8,
    so that 8 neighbouring columns are 16 bytes of B and of s. A row meets only the columns of its own bin.
    """
    c = tl.arange(0, COLUMNS)
    rank_c = r0 + c % BLOCK_R
    ok = tl.max_constancy(rank_c < lora_rank, [8])
    own = (rows_bin[:, None] == bin_c[None, :]) & row_ok[:, None] & ok[None, :]
    b = address.to(tl.pointer_type(DTYPE))
    b_ptrs = b[None, :] + n[:, None] * (b_step * lora_rank)[None, :] + rank_c[None, :]
    b_ptrs = tl.max_contiguous(tl.multiple_of(b_ptrs, [1, 16]), [1, 8])
    b_NC = tl.load(b_ptrs, mask=n_mask[:, None] & ok[None, :], other=0.0)
    s_row = site[None, :] * num_rows + pos[:, None]
    s_ptrs = s_ptr + s_row.to(tl.int64) * s_stride + rank_c[None, :]
    s_ptrs = tl.max_contiguous(tl.multiple_of(s_ptrs, [1, 16]), [1, 8])
    s_MC = tl.load(s_ptrs, mask=tl.max_constancy(own, [1, 8]), other=0.0)
    return tl.dot(s_MC, tl.trans(b_NC), acc, input_precision="ieee")


@triton.jit
def _add_deltas(acc, start, count, expert, n, n_mask, s_ptr, route, table, num_experts, slots_1, num_rows, s_stride,
                B_STEP: tl.constexpr, FIRST_PROJ: tl.constexpr, PROJ: tl.constexpr, BLOCK_M: tl.constexpr,
                BLOCK_R: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Add the deltas of all adapters of a base tile, of table column PROJ, to acc [BLOCK_M, N].

    The ranks of several adapters sit side by side as extra K columns, so a tile of many adapters takes few steps.
    Other adapters' columns meet a row as exact zeros; adapters are finite by contract. B_STEP: rows of B from one
    column to the next where gate and up share a pair.
    """
    COLUMNS: tl.constexpr = 64
    m = tl.arange(0, BLOCK_M)
    pos = start + m
    row_ok = m < count
    rows_bin = tl.load(route.row_bin + pos, mask=row_ok, other=0)
    slot_first = tl.maximum(tl.load(route.row_bin + start) % slots_1 - 1, 0)
    slot_last = tl.load(route.row_bin + start + count - 1) % slots_1 - 1
    group = tl.arange(0, COLUMNS) // BLOCK_R
    for q in range(slot_first, slot_last + 1, COLUMNS // BLOCK_R):
        rank_c = tl.zeros([COLUMNS], tl.int32)
        step_c = tl.zeros([COLUMNS], tl.int32) + 1
        site_c = tl.zeros([COLUMNS], tl.int32)
        address_c = tl.zeros([COLUMNS], tl.int64)
        max_rank = 0
        odd = 0
        for g in tl.static_range(COLUMNS // BLOCK_R):
            present = q + g <= slot_last
            record = ((q + g) * num_experts + expert) * 3 + PROJ
            lora_rank = tl.load(table.lora_rank + record, mask=present, other=0)
            address = tl.load(table.b_address + record, mask=present, other=0)
            max_rank = tl.maximum(max_rank, lora_rank)
            odd += lora_rank % 8
            rank_c = tl.where(group == g, (lora_rank // 8) * 8, rank_c)
            address_c = tl.where(group == g, (address // 16) * 16, address_c)
            if FIRST_PROJ == 0:
                gate_a = tl.load(table.a_address + record - PROJ, mask=present, other=0)
                up_a = tl.load(table.a_address + record - PROJ + 1, mask=present, other=0)
                site_c = tl.where((group == g) & (gate_a != up_a), PROJ, site_c)
                step_c = tl.where((group == g) & (gate_a == up_a), B_STEP, step_c)
        if odd == 0:
            for r0 in tl.range(0, max_rank, BLOCK_R, num_stages=1):
                acc = _column_step(acc, rank_c, address_c, step_c, site_c, r0, expert * slots_1 + q + group + 1,
                                   rows_bin, row_ok, pos, n, n_mask, s_ptr, num_rows, s_stride, BLOCK_R, COLUMNS,
                                   DTYPE)  # fmt: skip
        else:
            for i in range(COLUMNS // BLOCK_R):
                present = q + i <= slot_last
                record = ((q + i) * num_experts + expert) * 3 + PROJ
                site = 0
                step = 1
                if FIRST_PROJ == 0:
                    gate_a = tl.load(table.a_address + record - PROJ, mask=present, other=0)
                    up_a = tl.load(table.a_address + record - PROJ + 1, mask=present, other=0)
                    site = tl.where(gate_a == up_a, 0, PROJ)
                    step = tl.where(gate_a == up_a, B_STEP, 1)
                s_row = (site * num_rows + pos).to(tl.int64) * s_stride
                own = row_ok & (rows_bin == expert * slots_1 + q + i + 1)
                acc = expand(acc, s_ptr + s_row, own, tl.load(table.b_address + record, mask=present, other=0), n, step,
                             n_mask, tl.load(table.lora_rank + record, mask=present, other=0), BLOCK_R,
                             DTYPE)  # fmt: skip
    return acc


@triton.jit(do_not_specialize=["num_shrink", "num_experts", "slots_1", "num_rows"])
def expert_gemm_kernel(x_ptr, w, bias_ptr, out_ptr, s_ptr, route, table, num_shrink, num_experts, slots_1, num_rows,
                       s_stride, N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, SHRINK_PROJ: tl.constexpr,
                       NUM_PROJ: tl.constexpr, EXPAND_PROJ: tl.constexpr, HAS_BIAS: tl.constexpr,
                       BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
                       SWAP: tl.constexpr, USE_TMA: tl.constexpr, N_FASTEST: tl.constexpr,
                       PAIR_BLOCK_M: tl.constexpr, SHRINK_BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
                       PDL: tl.constexpr):  # fmt: skip
    """One program: a shrink tile if its id is below num_shrink, else one BLOCK_M x BLOCK_N base tile.

    NUM_PROJ: shrink columns, from SHRINK_PROJ on (0: none). EXPAND_PROJ: table column whose delta the epilogue adds
    (-1: none). SWAP: weights as the M side of the product, so that 16 rows still use the wide matrix instructions.
    """
    wait_for_previous(PDL)
    pid = tl.program_id(0)
    if pid < num_shrink:
        if NUM_PROJ > 0:
            shrink_tile(pid // NUM_PROJ, pid % NUM_PROJ, x_ptr, s_ptr, route, table, num_experts, slots_1, num_rows,
                        s_stride, K, TOP_K, SHRINK_PROJ, PAIR_BLOCK_M, SHRINK_BLOCK_K, BLOCK_R, STAGES)  # fmt: skip
    else:
        valid, tile, n_block = _base_tile(route, pid - num_shrink, (N + BLOCK_N - 1) // BLOCK_N, N_FASTEST)
        if valid:
            expert = tl.load(route.tile_expert + tile)
            start = tl.load(route.tile_start + tile)
            count = tl.load(route.tile_count + tile)
            m = tl.arange(0, BLOCK_M)
            row_mask = m < count
            pos = start + m
            n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
            n_mask = n < N
            k = tl.arange(0, BLOCK_K)
            x_ptrs = x_ptr + _gathered_row(route, pos, row_mask, TOP_K)[:, None] * K + k[None, :]
            if not USE_TMA:
                w_ptrs = w + expert.to(tl.int64) * (N * K) + n[:, None] * K + k[None, :]
            if SWAP:
                acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            else:
                acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
                if K % BLOCK_K == 0:
                    x = tl.load(x_ptrs + k0, mask=row_mask[:, None], other=0.0)
                else:
                    x = tl.load(x_ptrs + k0, mask=row_mask[:, None] & ((k0 + k)[None, :] < K), other=0.0)
                if USE_TMA:
                    w_NK = w.load([expert * N + n_block * BLOCK_N, k0])
                elif K % BLOCK_K == 0 and N % BLOCK_N == 0:
                    w_NK = tl.load(w_ptrs + k0)
                else:
                    w_NK = tl.load(w_ptrs + k0, mask=n_mask[:, None] & ((k0 + k)[None, :] < K), other=0.0)
                if SWAP:
                    acc = tl.dot(w_NK, tl.trans(x), acc, input_precision="ieee")
                else:
                    acc = tl.dot(x, tl.trans(w_NK), acc, input_precision="ieee")
            if SWAP:
                acc = tl.trans(acc)
            if HAS_BIAS:
                acc += tl.load(bias_ptr + expert.to(tl.int64) * N + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
            if EXPAND_PROJ >= 0:
                acc = _add_deltas(acc, start, count, expert, n, n_mask, s_ptr, route, table, num_experts, slots_1,
                                  num_rows, s_stride, 1, EXPAND_PROJ, EXPAND_PROJ, BLOCK_M, BLOCK_R,
                                  x_ptr.dtype.element_ty)  # fmt: skip
            out_ptrs = out_ptr + pos.to(tl.int64)[:, None] * N + n[None, :]
            tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & n_mask[None, :])


@triton.jit(do_not_specialize=["num_experts", "slots_1", "num_rows"])
def gate_up_act_kernel(x_ptr, w, bias_ptr, act_ptr, s_ptr, route, table, num_experts, slots_1, num_rows, s_stride,
                       alpha, limit, F: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, INTERLEAVED: tl.constexpr,
                       ACTIVATION: tl.constexpr, HAS_LORA: tl.constexpr, HAS_BIAS: tl.constexpr,
                       BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
                       USE_TMA: tl.constexpr, N_FASTEST: tl.constexpr, BLOCK_R: tl.constexpr,
                       PDL: tl.constexpr):  # fmt: skip
    """act[pos] = activation(gate, up) of one BLOCK_M x BLOCK_F tile; gate and up never reach memory."""
    wait_for_previous(PDL)
    valid, tile, f_block = _base_tile(route, tl.program_id(0), (F + BLOCK_F - 1) // BLOCK_F, N_FASTEST)
    if valid:
        expert = tl.load(route.tile_expert + tile)
        start = tl.load(route.tile_start + tile)
        count = tl.load(route.tile_count + tile)
        m = tl.arange(0, BLOCK_M)
        row_mask = m < count
        pos = start + m
        f = f_block * BLOCK_F + tl.arange(0, BLOCK_F)
        f_mask = f < F
        k = tl.arange(0, BLOCK_K)
        gate_row = 2 * f if INTERLEAVED else f
        up_row = 2 * f + 1 if INTERLEAVED else F + f
        x_ptrs = x_ptr + _gathered_row(route, pos, row_mask, TOP_K)[:, None] * K + k[None, :]
        if not USE_TMA:
            w_expert = w + expert.to(tl.int64) * (2 * F * K)
            gate_ptrs = w_expert + gate_row[:, None] * K + k[None, :]
            up_ptrs = w_expert + up_row[:, None] * K + k[None, :]
        gate = tl.zeros([BLOCK_M, BLOCK_F], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_F], tl.float32)
        for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            if K % BLOCK_K == 0:
                x = tl.load(x_ptrs + k0, mask=row_mask[:, None], other=0.0)
            else:
                x = tl.load(x_ptrs + k0, mask=row_mask[:, None] & ((k0 + k)[None, :] < K), other=0.0)
            if USE_TMA:
                w_gate = w.load([expert * (2 * F) + f_block * BLOCK_F, k0])
                w_up = w.load([expert * (2 * F) + F + f_block * BLOCK_F, k0])
            elif K % BLOCK_K == 0 and F % BLOCK_F == 0:
                w_gate = tl.load(gate_ptrs + k0)
                w_up = tl.load(up_ptrs + k0)
            else:
                w_mask = f_mask[:, None] & ((k0 + k)[None, :] < K)
                w_gate = tl.load(gate_ptrs + k0, mask=w_mask, other=0.0)
                w_up = tl.load(up_ptrs + k0, mask=w_mask, other=0.0)
            gate = tl.dot(x, tl.trans(w_gate), gate, input_precision="ieee")
            up = tl.dot(x, tl.trans(w_up), up, input_precision="ieee")
        if HAS_BIAS:
            bias_row = bias_ptr + expert.to(tl.int64) * (2 * F)
            gate += tl.load(bias_row + gate_row, mask=f_mask, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias_row + up_row, mask=f_mask, other=0.0).to(tl.float32)[None, :]
        if HAS_LORA:
            B_STEP: tl.constexpr = 2 if INTERLEAVED else 1
            gate = _add_deltas(gate, start, count, expert, f, f_mask, s_ptr, route, table, num_experts, slots_1,
                               num_rows, s_stride, B_STEP, 0, 0, BLOCK_M, BLOCK_R, x_ptr.dtype.element_ty)  # fmt: skip
            up = _add_deltas(up, start, count, expert, f, f_mask, s_ptr, route, table, num_experts, slots_1,
                             num_rows, s_stride, B_STEP, 0, 1, BLOCK_M, BLOCK_R, x_ptr.dtype.element_ty)  # fmt: skip
        act = activate(gate, up, alpha, limit, ACTIVATION)
        act_ptrs = act_ptr + pos.to(tl.int64)[:, None] * F + f[None, :]
        tl.store(act_ptrs, act.to(act_ptr.dtype.element_ty), mask=row_mask[:, None] & f_mask[None, :])


@triton.jit(do_not_specialize=["num_experts", "slots_1", "num_rows"])
def shrink_kernel(x_ptr, s_ptr, route, table, num_experts, slots_1, num_rows, s_stride, K: tl.constexpr,
                  TOP_K: tl.constexpr, FIRST_PROJ: tl.constexpr, NUM_PROJ: tl.constexpr, PAIR_BLOCK_M: tl.constexpr,
                  BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """The shrink tiles alone: s[proj, pos] = x[row] @ A[slot, expert, FIRST_PROJ + proj]^T."""
    wait_for_previous(PDL)
    pid = tl.program_id(0)
    shrink_tile(pid // NUM_PROJ, pid % NUM_PROJ, x_ptr, s_ptr, route, table, num_experts, slots_1, num_rows, s_stride,
                K, TOP_K, FIRST_PROJ, PAIR_BLOCK_M, BLOCK_K, BLOCK_R, STAGES)  # fmt: skip
