"""The two expert GEMMs over base tiles, with room for LoRA work in the same launch.

`expert_gemm_kernel` computes out[pos] = x[row] @ W[expert]^T. Its grid may start with shrink tiles: they read the same
rows but other weights, so their bytes share the memory stream of the base weights. Its epilogue may add expanded deltas
(EXPAND), one adapter segment of the tile after another, under the segment's row mask.
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
def _add_segments(acc, start, count, n, n_mask, proj: tl.constexpr, s_ptr, route, table, num_experts, slots_1,
                  num_rows, s_stride, B_STEP: tl.constexpr, FIRST_PROJ: tl.constexpr, BLOCK_M: tl.constexpr,
                  BLOCK_R: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Add each adapter segment's delta of column FIRST_PROJ + proj to its rows of acc.

    Other rows get exact zeros added: their shrink results are masked, and adapters are finite by contract.

    B_STEP: rows of B from one column to the next where gate and up share a pair.
    """
    m = tl.arange(0, BLOCK_M)
    first = start
    end = start + count
    while first < end:
        bin_id = tl.load(route.row_bin + first)
        last = tl.minimum(tl.load(route.pair_end + first), end)
        slot = bin_id % slots_1 - 1
        if slot >= 0:
            record = (slot * num_experts + bin_id // slots_1) * 3 + FIRST_PROJ + proj
            lora_rank = tl.load(table.lora_rank + record)
            if lora_rank > 0:
                site = proj
                step = 1
                if FIRST_PROJ == 0:
                    shared_a = tl.load(table.a_address + record - proj) == tl.load(table.a_address + record - proj + 1)
                    site = tl.where(shared_a, 0, proj)
                    step = tl.where(shared_a, B_STEP, 1)
                pos = start + m
                mask = (pos >= first) & (pos < last)
                s_row = (site * num_rows + pos).to(tl.int64) * s_stride
                acc = expand(acc, s_ptr + s_row, mask, tl.load(table.b_address + record), n, step, n_mask, lora_rank,
                             BLOCK_R, DTYPE)  # fmt: skip
        first = last
    return acc


@triton.jit(do_not_specialize=["num_shrink", "num_experts", "slots_1", "num_rows"])
def expert_gemm_kernel(x_ptr, w, out_ptr, s_ptr, route, table, num_shrink, num_experts, slots_1, num_rows, s_stride,
                       N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, SHRINK_PROJ: tl.constexpr,
                       NUM_PROJ: tl.constexpr, EXPAND_PROJ: tl.constexpr, BLOCK_M: tl.constexpr,
                       BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SWAP: tl.constexpr,
                       USE_TMA: tl.constexpr, N_FASTEST: tl.constexpr, PAIR_BLOCK_M: tl.constexpr,
                       SHRINK_BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
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
                    acc = tl.dot(w_NK, tl.trans(x), acc)
                else:
                    acc = tl.dot(x, tl.trans(w_NK), acc)
            if SWAP:
                acc = tl.trans(acc)
            if EXPAND_PROJ >= 0:
                acc = _add_segments(acc, start, count, n, n_mask, 0, s_ptr, route, table, num_experts, slots_1,
                                    num_rows, s_stride, 1, EXPAND_PROJ, BLOCK_M, BLOCK_R,
                                    x_ptr.dtype.element_ty)  # fmt: skip
            out_ptrs = out_ptr + pos.to(tl.int64)[:, None] * N + n[None, :]
            tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & n_mask[None, :])


@triton.jit(do_not_specialize=["num_experts", "slots_1", "num_rows"])
def gate_up_act_kernel(x_ptr, w, act_ptr, s_ptr, route, table, num_experts, slots_1, num_rows, s_stride, alpha, limit,
                       F: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, INTERLEAVED: tl.constexpr,
                       ACTIVATION: tl.constexpr, HAS_LORA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
                       BLOCK_K: tl.constexpr, STAGES: tl.constexpr, USE_TMA: tl.constexpr,
                       N_FASTEST: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
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
            gate = tl.dot(x, tl.trans(w_gate), gate)
            up = tl.dot(x, tl.trans(w_up), up)
        if HAS_LORA:
            B_STEP: tl.constexpr = 2 if INTERLEAVED else 1
            gate = _add_segments(gate, start, count, f, f_mask, 0, s_ptr, route, table, num_experts, slots_1,
                                 num_rows, s_stride, B_STEP, 0, BLOCK_M, BLOCK_R, x_ptr.dtype.element_ty)  # fmt: skip
            up = _add_segments(up, start, count, f, f_mask, 1, s_ptr, route, table, num_experts, slots_1,
                               num_rows, s_stride, B_STEP, 0, BLOCK_M, BLOCK_R, x_ptr.dtype.element_ty)  # fmt: skip
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
