"""The two expert GEMMs over base tiles, with room for LoRA work in the same launch.

`expert_gemm_kernel` computes out[pos] = x[row] @ W[expert]^T. Its grid may start with shrink tiles: they read the same
rows but other weights, so their bytes share the memory stream of the base weights. Its epilogue may add expanded deltas
(EXPANDS), by the tile's list (`delta_columns.py`).
`gate_up_act_kernel` computes gate and up columns side by side, adds their deltas and stores only the activation.
`shrink_kernel` is the shrink alone, for the fused path, where it must finish before the GEMM starts.

An expert's last tile may hold few rows: up to TAIL_M of them run in a body of TAIL_M rows (0: there is none). Or it
holds up to EXTRA_M more than BLOCK_M: those meet the same block of weights, as the N side of a second product.
Base results do not depend on adapters: the K order of every sum is that of BLOCK_K in all bodies, and the shrink
results of other rows are masked to zero before they meet an adapter's B.

Launch order under programmatic dependent launch: a GEMM that adds deltas in its epilogue begins beside the shrinks, and
waits for them there (they let it launch only after their own wait, so that all before them have ended); without
adapters the down GEMM begins on tiles whose rows are complete (`first_tiles`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from compute_worker.kernels.activation import activate
from compute_worker.kernels.delta_columns import add_listed_deltas, list_columns, list_of_tile
from compute_worker.kernels.first_tiles import count_tile, wait_for_tile
from compute_worker.kernels.lora import let_next_launch, let_next_launch_and_see, shrink_tile, wait_for_data
from compute_worker.kernels.tiles import base_tile, bin_of_rows, row_of_base_tile


@triton.jit
def _looked_up(route, table, columns, tile, expert, pos, row_mask, slots_1, max_groups, NUM_PROJ: tl.constexpr,
               ADDS: tl.constexpr, DIRECT: tl.constexpr):  # fmt: skip
    """(bin of each row, widest, words, number of groups): what an epilogue that adds deltas needs of its tile.

    To be called before the long loop, so that the epilogue need not wait for them one after the other. Without ADDS
    nothing is read.
    """
    rows_bin = pos
    widest = 0
    words = columns.words
    num_groups = 0
    if ADDS:
        rows_bin = bin_of_rows(route, expert, pos, row_mask, slots_1, DIRECT, ".cg")
        widest, words, num_groups = list_of_tile(columns, table, tile, max_groups, NUM_PROJ)
    return rows_bin, widest, words, num_groups


@triton.jit
def _finish(acc, bias_ptr, out_ptr, s_ptr, widest, words, num_groups, expert, pos, row_mask, rows_bin, n, n_mask,
            num_rows, s_stride, N: tl.constexpr, EXPANDS: tl.constexpr, HAS_BIAS: tl.constexpr, COLUMNS: tl.constexpr,
            DTYPE: tl.constexpr):  # fmt: skip
    """out of rows pos and columns n from their sums: bias and deltas added, rounded, stored."""
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert.to(tl.int64) * N + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
    if EXPANDS:
        acc, _ = add_listed_deltas(acc, acc, widest, words, num_groups, n, n_mask, rows_bin, pos, s_ptr, num_rows,
                                   s_stride, 1, COLUMNS, DTYPE)  # fmt: skip
    out_ptrs = out_ptr + pos.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & n_mask[None, :])


@triton.jit
def _gemm_tile(x_ptr, w, bias_ptr, out_ptr, s_ptr, route, table, columns, x_row, extra_x_row, tile, expert, start,
               count, n_block, slots_1, num_rows, s_stride, max_groups, N: tl.constexpr, K: tl.constexpr,
               TOP_K: tl.constexpr, EXPANDS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr,
               EXTRA_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
               SWAP: tl.constexpr, USE_TMA: tl.constexpr, COLUMNS: tl.constexpr, DIRECT: tl.constexpr,
               PDL: tl.constexpr):  # fmt: skip
    """One tile of BLOCK_M + EXTRA_M rows and BLOCK_N columns of out.

    x_row [BLOCK_M], extra_x_row [EXTRA_M]: of `row_of_base_tile`; not used where TOP_K is 0, or EXTRA_M.
    """
    m = tl.arange(0, BLOCK_M)
    row_mask = m < count
    pos = start + m
    n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < N
    k = tl.arange(0, BLOCK_K)
    if TOP_K == 0:
        x_row = pos
    x_ptrs = x_ptr + x_row.to(tl.int64)[:, None] * K + k[None, :]
    if EXTRA_M > 0:
        extra_m = BLOCK_M + tl.arange(0, EXTRA_M)
        extra_mask = extra_m < count
        extra_pos = start + extra_m
        if TOP_K == 0:
            extra_x_row = extra_pos
        extra_ptrs = x_ptr + extra_x_row.to(tl.int64)[:, None] * K + k[None, :]
        extra = tl.zeros([BLOCK_N, EXTRA_M], tl.float32)
    rows_bin, widest, words, num_groups = _looked_up(route, table, columns, tile, expert, pos, row_mask, slots_1,
                                                     max_groups, 1, EXPANDS, DIRECT)  # fmt: skip
    if not USE_TMA:
        w_ptrs = w + expert.to(tl.int64) * (N * K) + n[:, None] * K + k[None, :]
    if SWAP:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        x = _load_x(x_ptrs, row_mask, k0, k, K, BLOCK_K)
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
        if EXTRA_M > 0:
            x_extra = _load_x(extra_ptrs, extra_mask, k0, k, K, BLOCK_K)
            extra = tl.dot(w_NK, tl.trans(x_extra), extra, input_precision="ieee")
    if SWAP:
        acc = tl.trans(acc)
    if EXPANDS:
        wait_for_data(PDL)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    _finish(acc, bias_ptr, out_ptr, s_ptr, widest, words, num_groups, expert, pos, row_mask, rows_bin, n, n_mask,
            num_rows, s_stride, N, EXPANDS, HAS_BIAS, COLUMNS, DTYPE)  # fmt: skip
    if EXTRA_M > 0:
        extra_bin = extra_pos
        if EXPANDS:
            extra_bin = bin_of_rows(route, expert, extra_pos, extra_mask, slots_1, DIRECT, ".cg")
        _finish(tl.trans(extra), bias_ptr, out_ptr, s_ptr, widest, words, num_groups, expert, extra_pos, extra_mask,
                extra_bin, n, n_mask, num_rows, s_stride, N, EXPANDS, HAS_BIAS, COLUMNS, DTYPE)  # fmt: skip


@triton.jit
def _load_x(x_ptrs, row_mask, k0, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """A block of x, 0 in rows that there are not and past K."""
    if K % BLOCK_K == 0:
        x = tl.load(x_ptrs + k0, mask=row_mask[:, None], other=0.0)
    else:
        x = tl.load(x_ptrs + k0, mask=row_mask[:, None] & ((k0 + k)[None, :] < K), other=0.0)
    return x


@triton.jit(
    do_not_specialize=["num_shrink", "num_experts", "slots_1", "num_rows", "max_groups", "first_tiles", "x_blocks"]
)
def expert_gemm_kernel(x_ptr, w, bias_ptr, out_ptr, s_ptr, route, table, columns, num_shrink, num_experts, slots_1,
                       num_rows, s_stride, max_groups, first_tiles, x_blocks, N: tl.constexpr, K: tl.constexpr,
                       TOP_K: tl.constexpr, SHRINK_PROJ: tl.constexpr, NUM_PROJ: tl.constexpr,
                       EXPANDS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, TAIL_M: tl.constexpr,
                       EXTRA_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
                       SWAP: tl.constexpr, USE_TMA: tl.constexpr, N_FASTEST: tl.constexpr, PAIR_BLOCK_M: tl.constexpr,
                       SHRINK_BLOCK_C: tl.constexpr, SHRINK_BLOCK_K: tl.constexpr, SHRINK_NARROW_K: tl.constexpr,
                       SHRINK_STAGES: tl.constexpr, BLOCK_R: tl.constexpr, COLUMNS: tl.constexpr, DIRECT: tl.constexpr,
                       EARLY: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One program: a shrink tile if its id is below num_shrink, else BLOCK_N columns of a base tile.

    NUM_PROJ: shrink columns, from SHRINK_PROJ on (0: none). EXPANDS: the epilogue adds deltas, of a kernel that ran
    before this one; the list in columns and all that the main loop reads must be complete when this one is launched.
    SWAP: weights as the M side of the product, so that 16 rows still use the wide matrix instructions.
    EARLY (with N_FASTEST, without shrinks): programs of the first_tiles first tiles wait for no other tile of x, which
    x_blocks programs of the kernel before have each counted.
    """
    pid = tl.program_id(0)
    NUM_N_BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    CACHE: tl.constexpr = ".cg" if EXPANDS or EARLY else ""
    if EARLY:
        wait_for_tile(route, pid // NUM_N_BLOCKS, first_tiles, x_blocks, PDL)
    elif not EXPANDS:
        wait_for_data(PDL)
    let_next_launch(PDL)
    if pid < num_shrink:
        if NUM_PROJ > 0:
            shrink_tile(pid, x_ptr, s_ptr, s_ptr, route, table, num_experts, slots_1, num_rows, s_stride, K, TOP_K,
                        SHRINK_PROJ, NUM_PROJ, PAIR_BLOCK_M, SHRINK_BLOCK_C, SHRINK_BLOCK_K, SHRINK_NARROW_K, BLOCK_R,
                        1, SHRINK_STAGES, DIRECT)  # fmt: skip
    else:
        valid, tile, n_block, expert, start, count = base_tile(route, pid - num_shrink, num_experts, NUM_N_BLOCKS,
                                                               N_FASTEST, DIRECT, CACHE)  # fmt: skip
        TILE_M: tl.constexpr = BLOCK_M + EXTRA_M
        x_row = start
        tail_x_row = start
        extra_x_row = start
        if TOP_K > 0:
            x_row = row_of_base_tile(route, tile, 0, BLOCK_M, TILE_M, TOP_K, DIRECT, CACHE)
            if TAIL_M > 0:
                tail_x_row = row_of_base_tile(route, tile, 0, TAIL_M, TILE_M, TOP_K, DIRECT, CACHE)
            if EXTRA_M > 0:
                extra_x_row = row_of_base_tile(route, tile, BLOCK_M, EXTRA_M, TILE_M, TOP_K, DIRECT, CACHE)
        if valid:
            if TAIL_M > 0 and count <= TAIL_M:
                _gemm_tile(x_ptr, w, bias_ptr, out_ptr, s_ptr, route, table, columns, tail_x_row, extra_x_row, tile,
                           expert, start, count, n_block, slots_1, num_rows, s_stride, max_groups, N, K, TOP_K, EXPANDS,
                           HAS_BIAS, TAIL_M, 0, BLOCK_N, BLOCK_K, STAGES, SWAP, USE_TMA, COLUMNS, DIRECT,
                           PDL)  # fmt: skip
            elif EXTRA_M > 0 and count > BLOCK_M:
                _gemm_tile(x_ptr, w, bias_ptr, out_ptr, s_ptr, route, table, columns, x_row, extra_x_row, tile, expert,
                           start, count, n_block, slots_1, num_rows, s_stride, max_groups, N, K, TOP_K, EXPANDS,
                           HAS_BIAS, BLOCK_M, EXTRA_M, BLOCK_N, BLOCK_K, STAGES, SWAP, USE_TMA, COLUMNS, DIRECT,
                           PDL)  # fmt: skip
            else:
                _gemm_tile(x_ptr, w, bias_ptr, out_ptr, s_ptr, route, table, columns, x_row, extra_x_row, tile, expert,
                           start, count, n_block, slots_1, num_rows, s_stride, max_groups, N, K, TOP_K, EXPANDS,
                           HAS_BIAS, BLOCK_M, 0, BLOCK_N, BLOCK_K, STAGES, SWAP, USE_TMA, COLUMNS, DIRECT,
                           PDL)  # fmt: skip
        elif EXPANDS:
            wait_for_data(PDL)


@triton.jit
def _finish_gate_up(gate, up, bias_ptr, act_ptr, s_ptr, widest, words, num_groups, expert, pos, row_mask, rows_bin, f,
                    f_mask, gate_row, up_row, num_rows, s_stride, alpha, limit, F: tl.constexpr,
                    ACTIVATION: tl.constexpr, HAS_LORA: tl.constexpr, HAS_BIAS: tl.constexpr, COLUMNS: tl.constexpr,
                    DTYPE: tl.constexpr):  # fmt: skip
    """act of rows pos and columns f from their sums: biases and deltas added, activated, stored."""
    if HAS_BIAS:
        bias_row = bias_ptr + expert.to(tl.int64) * (2 * F)
        gate += tl.load(bias_row + gate_row, mask=f_mask, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_row + up_row, mask=f_mask, other=0.0).to(tl.float32)[None, :]
    if HAS_LORA:
        gate, up = add_listed_deltas(gate, up, widest, words, num_groups, f, f_mask, rows_bin, pos, s_ptr, num_rows,
                                     s_stride, 2, COLUMNS, DTYPE)  # fmt: skip
    act = activate(gate, up, alpha, limit, ACTIVATION)
    act_ptrs = act_ptr + pos.to(tl.int64)[:, None] * F + f[None, :]
    tl.store(act_ptrs, act.to(act_ptr.dtype.element_ty), mask=row_mask[:, None] & f_mask[None, :])


@triton.jit
def _gate_up_act_tile(x_ptr, w, bias_ptr, act_ptr, s_ptr, route, table, columns, x_row, extra_x_row, tile, expert,
                      start, count, f_block, slots_1, num_rows, s_stride, max_groups, alpha, limit, F: tl.constexpr,
                      K: tl.constexpr, INTERLEAVED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_LORA: tl.constexpr,
                      HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, EXTRA_M: tl.constexpr, BLOCK_F: tl.constexpr,
                      BLOCK_K: tl.constexpr, STAGES: tl.constexpr, USE_TMA: tl.constexpr, WIDE: tl.constexpr,
                      COLUMNS: tl.constexpr, DIRECT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One tile of BLOCK_M + EXTRA_M rows and BLOCK_F columns of act; x_row, extra_x_row as in `_gemm_tile`."""
    m = tl.arange(0, BLOCK_M)
    row_mask = m < count
    pos = start + m
    f = f_block * BLOCK_F + tl.arange(0, BLOCK_F)
    f_mask = f < F
    k = tl.arange(0, BLOCK_K)
    gate_row = 2 * f if INTERLEAVED else f
    up_row = 2 * f + 1 if INTERLEAVED else F + f
    x_ptrs = x_ptr + x_row.to(tl.int64)[:, None] * K + k[None, :]
    if EXTRA_M > 0:
        extra_m = BLOCK_M + tl.arange(0, EXTRA_M)
        extra_mask = extra_m < count
        extra_ptrs = x_ptr + extra_x_row.to(tl.int64)[:, None] * K + k[None, :]
        extra_gate = tl.zeros([BLOCK_F, EXTRA_M], tl.float32)
        extra_up = tl.zeros([BLOCK_F, EXTRA_M], tl.float32)
    rows_bin, widest, words, num_groups = _looked_up(route, table, columns, tile, expert, pos, row_mask, slots_1,
                                                     max_groups, 2, HAS_LORA, DIRECT)  # fmt: skip
    if not USE_TMA:
        w_expert = w + expert.to(tl.int64) * (2 * F * K)
        gate_ptrs = w_expert + gate_row[:, None] * K + k[None, :]
        up_ptrs = w_expert + up_row[:, None] * K + k[None, :]
    if WIDE:
        # One product of gate and up columns side by side: two of half the width would read x from shared memory twice.
        acc = tl.zeros([BLOCK_M, 2 * BLOCK_F], tl.float32)
    else:
        gate = tl.zeros([BLOCK_M, BLOCK_F], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_F], tl.float32)
    for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        x = _load_x(x_ptrs, row_mask, k0, k, K, BLOCK_K)
        if EXTRA_M > 0:
            x_extra = _load_x(extra_ptrs, extra_mask, k0, k, K, BLOCK_K)
        if WIDE:
            w_2FK = tl.reshape(w.load([expert * 2, f_block * BLOCK_F, k0]), [2 * BLOCK_F, BLOCK_K])
            acc = tl.dot(x, tl.trans(w_2FK), acc, input_precision="ieee")
        else:
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
            if EXTRA_M > 0:
                extra_gate = tl.dot(w_gate, tl.trans(x_extra), extra_gate, input_precision="ieee")
                extra_up = tl.dot(w_up, tl.trans(x_extra), extra_up, input_precision="ieee")
    if HAS_LORA:
        wait_for_data(PDL)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    if WIDE:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [BLOCK_M, 2, BLOCK_F]), [0, 2, 1]))
    _finish_gate_up(gate, up, bias_ptr, act_ptr, s_ptr, widest, words, num_groups, expert, pos, row_mask, rows_bin, f,
                    f_mask, gate_row, up_row, num_rows, s_stride, alpha, limit, F, ACTIVATION, HAS_LORA, HAS_BIAS,
                    COLUMNS, DTYPE)  # fmt: skip
    if EXTRA_M > 0:
        extra_pos = start + extra_m
        extra_bin = extra_pos
        if HAS_LORA:
            extra_bin = bin_of_rows(route, expert, extra_pos, extra_mask, slots_1, DIRECT, ".cg")
        _finish_gate_up(tl.trans(extra_gate), tl.trans(extra_up), bias_ptr, act_ptr, s_ptr, widest, words, num_groups,
                        expert, extra_pos, extra_mask, extra_bin, f, f_mask, gate_row, up_row, num_rows, s_stride,
                        alpha, limit, F, ACTIVATION, HAS_LORA, HAS_BIAS, COLUMNS, DTYPE)  # fmt: skip


@triton.jit(do_not_specialize=["num_experts", "slots_1", "num_rows", "max_groups", "first_tiles"])
def gate_up_act_kernel(x_ptr, w, w_apart, bias_ptr, act_ptr, s_ptr, route, table, columns, num_experts, slots_1,
                       num_rows, s_stride, max_groups, first_tiles, alpha, limit, F: tl.constexpr, K: tl.constexpr,
                       TOP_K: tl.constexpr, INTERLEAVED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_LORA: tl.constexpr,
                       HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, TAIL_M: tl.constexpr, EXTRA_M: tl.constexpr,
                       BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, USE_TMA: tl.constexpr,
                       WIDE: tl.constexpr, N_FASTEST: tl.constexpr, COLUMNS: tl.constexpr, DIRECT: tl.constexpr,
                       EARLY: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """act[pos] = activation(gate, up), BLOCK_F columns of a base tile; gate and up never reach memory.

    WIDE: w is a descriptor of [2 e, F, K] whose blocks hold gate rows and the up rows beside them; w_apart is what w is
    without, for tiles of more than BLOCK_M rows, whose weights are on either side of a product. HAS_LORA: as EXPANDS
    of `expert_gemm_kernel`. EARLY: counts the programs of the first_tiles first tiles as they end.
    """
    NUM_F_BLOCKS: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    CACHE: tl.constexpr = ".cg" if HAS_LORA else ""
    if not HAS_LORA:
        wait_for_data(PDL)
    let_next_launch(PDL)
    valid, tile, f_block, expert, start, count = base_tile(route, tl.program_id(0), num_experts, NUM_F_BLOCKS,
                                                           N_FASTEST, DIRECT, CACHE)  # fmt: skip
    TILE_M: tl.constexpr = BLOCK_M + EXTRA_M
    x_row = row_of_base_tile(route, tile, 0, BLOCK_M, TILE_M, TOP_K, DIRECT, CACHE)
    tail_x_row = x_row
    extra_x_row = x_row
    if TAIL_M > 0:
        tail_x_row = row_of_base_tile(route, tile, 0, TAIL_M, TILE_M, TOP_K, DIRECT, CACHE)
    if EXTRA_M > 0:
        extra_x_row = row_of_base_tile(route, tile, BLOCK_M, EXTRA_M, TILE_M, TOP_K, DIRECT, CACHE)
    if valid:
        if TAIL_M > 0 and count <= TAIL_M:
            _gate_up_act_tile(x_ptr, w, bias_ptr, act_ptr, s_ptr, route, table, columns, tail_x_row, extra_x_row, tile,
                              expert, start, count, f_block, slots_1, num_rows, s_stride, max_groups, alpha, limit, F,
                              K, INTERLEAVED, ACTIVATION, HAS_LORA, HAS_BIAS, TAIL_M, 0, BLOCK_F, BLOCK_K, STAGES,
                              USE_TMA, WIDE, COLUMNS, DIRECT, PDL)  # fmt: skip
        elif EXTRA_M > 0 and count > BLOCK_M:
            _gate_up_act_tile(x_ptr, w_apart, bias_ptr, act_ptr, s_ptr, route, table, columns, x_row, extra_x_row, tile,
                              expert, start, count, f_block, slots_1, num_rows, s_stride, max_groups, alpha, limit, F,
                              K, INTERLEAVED, ACTIVATION, HAS_LORA, HAS_BIAS, BLOCK_M, EXTRA_M, BLOCK_F, BLOCK_K,
                              STAGES, USE_TMA, False, COLUMNS, DIRECT, PDL)  # fmt: skip
        else:
            _gate_up_act_tile(x_ptr, w, bias_ptr, act_ptr, s_ptr, route, table, columns, x_row, extra_x_row, tile,
                              expert, start, count, f_block, slots_1, num_rows, s_stride, max_groups, alpha, limit, F,
                              K, INTERLEAVED, ACTIVATION, HAS_LORA, HAS_BIAS, BLOCK_M, 0, BLOCK_F, BLOCK_K, STAGES,
                              USE_TMA, WIDE, COLUMNS, DIRECT, PDL)  # fmt: skip
        if EARLY:
            count_tile(route, tile, first_tiles)
    elif HAS_LORA:
        wait_for_data(PDL)


@triton.jit(do_not_specialize=["num_tiles", "num_experts", "slots_1", "num_rows", "max_groups"])
def shrink_kernel(x_ptr, s_ptr, partial_ptr, route, table, gate_up, down, num_tiles, num_experts, slots_1, num_rows,
                  s_stride, max_groups, K: tl.constexpr, TOP_K: tl.constexpr, FIRST_PROJ: tl.constexpr,
                  NUM_PROJ: tl.constexpr, B_STEP: tl.constexpr, LISTS: tl.constexpr, BASE_BLOCK_M: tl.constexpr,
                  PAIR_BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
                  NARROW_BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
                  DIRECT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """The shrink tiles alone: s[proj, pos] = x[row] @ A[slot, expert, FIRST_PROJ + proj]^T.

    LISTS: the first 2 * num_tiles programs list the columns of a base tile of up to BASE_BLOCK_M rows each (a power of
    two), into gate_up and down. The GEMM that
    comes next may read them at once.
    """
    wait_for_data(PDL)
    pid = tl.program_id(0)
    first: tl.constexpr = 2 if LISTS else 0
    if LISTS and pid < 2 * num_tiles:
        ITEM_BYTES: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth // 8
        list_columns(pid, route, gate_up, down, table, num_tiles, num_experts, slots_1, max_groups, B_STEP,
                     BASE_BLOCK_M, ITEM_BYTES, DIRECT)  # fmt: skip
        let_next_launch_and_see(PDL)
    else:
        let_next_launch(PDL)
        shrink_tile(pid - first * num_tiles, x_ptr, s_ptr, partial_ptr, route, table, num_experts, slots_1, num_rows,
                    s_stride, K, TOP_K, FIRST_PROJ, NUM_PROJ, PAIR_BLOCK_M, BLOCK_C, BLOCK_K, NARROW_BLOCK_K, BLOCK_R,
                    SPLITS, STAGES, DIRECT)  # fmt: skip
