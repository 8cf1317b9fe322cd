"""Activation between the GEMMs, with the gate and up deltas of LoRA added on the way (split path)."""

from __future__ import annotations

import triton
import triton.language as tl

from compute_worker.kernels.layout import Activation
from compute_worker.kernels.lora import NARROW_RANK, aligned_pointer, expand, let_next_launch, wait_for_data
from compute_worker.kernels.tiles import pair_tile

SILU_GATED = tl.constexpr(int(Activation.SILU_GATED))
CLAMPED_SWIGLU = tl.constexpr(int(Activation.CLAMPED_SWIGLU))
SILU = tl.constexpr(int(Activation.SILU))


@triton.jit
def activate(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """fp32 activation of fp32 gate and up; activations without a gate use up alone."""
    if ACTIVATION == SILU_GATED:
        out = gate / (1.0 + tl.exp(-gate)) * up
    elif ACTIVATION == CLAMPED_SWIGLU:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        out = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
    elif ACTIVATION == SILU:
        out = up / (1.0 + tl.exp(-up))
    else:
        up = tl.maximum(up, 0.0)
        out = up * up
    return out


@triton.jit
def _load_gate_up(gate_up_ptr, pos, f, mask, F: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """fp32 (gate, up) of rows pos and columns f; without a gate both are the one projection."""
    if GATED:
        row_ptrs = gate_up_ptr + pos[:, None] * (2 * F)
        gate_col = 2 * f if INTERLEAVED else f
        up_col = 2 * f + 1 if INTERLEAVED else F + f
        gate = tl.load(row_ptrs + gate_col[None, :], mask=mask, other=0.0).to(tl.float32)
        up = tl.load(row_ptrs + up_col[None, :], mask=mask, other=0.0).to(tl.float32)
    else:
        up = tl.load(gate_up_ptr + pos[:, None] * F + f[None, :], mask=mask, other=0.0).to(tl.float32)
        gate = up
    return gate, up


@triton.jit
def _add_and_activate(gate_up_ptr, act_ptr, pos, row_mask, f, s_gate, s_up, b_gate, b_up, alpha, limit,
                      F: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
                      ACTIVATION: tl.constexpr):  # fmt: skip
    """act of rows pos and columns f, from the GEMM's result and the deltas s B^T of one rank block."""
    mask = row_mask[:, None] & (f < F)[None, :]
    gate, up = _load_gate_up(gate_up_ptr, pos, f, mask, F, GATED, INTERLEAVED)
    gate = tl.dot(s_gate, tl.trans(b_gate), gate, input_precision="ieee")
    up = tl.dot(s_up, tl.trans(b_up), up, input_precision="ieee")
    out = activate(gate, up, alpha, limit, ACTIVATION).to(act_ptr.dtype.element_ty)
    tl.store(act_ptr + pos[:, None] * F + f[None, :], out, mask=mask)


@triton.jit
def _in_one_block(gate_up_ptr, act_ptr, s_gate_ptrs, s_up_ptrs, gate_b, up_b, gate_rank, up_rank, b_step, pos, row_mask,
                  first, last, alpha, limit, F: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
                  ACTIVATION: tl.constexpr, BLOCK_F: tl.constexpr, SPAN_F: tl.constexpr, BLOCK_R: tl.constexpr,
                  STAGES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Columns first to last of a pair tile whose ranks are multiples of 8 and at most BLOCK_R."""
    dtype: tl.constexpr = act_ptr.dtype.element_ty
    # Said again, for the compiler: where it cannot tell that masks cover whole blocks of 8, it loads B and s two bytes
    # at a time.
    gate_rank = (gate_rank // 8) * 8
    up_rank = (up_rank // 8) * 8
    r = tl.arange(0, BLOCK_R)
    r_gate = r < gate_rank
    r_up = r < up_rank
    b_gate_row = aligned_pointer(gate_b, dtype) + r[None, :]
    b_up_row = aligned_pointer(up_b, dtype) + r[None, :]
    gate_stride = b_step * gate_rank
    up_stride = b_step * up_rank
    gate_mask = row_mask[:, None] & r_gate[None, :]
    up_mask = row_mask[:, None] & r_up[None, :]
    if SPAN_F == BLOCK_F:
        f = first + tl.arange(0, BLOCK_F)
        f_mask = (f < F)[:, None]
        b_gate = tl.load(b_gate_row + f[:, None] * gate_stride, mask=f_mask & r_gate[None, :], other=0.0,
                         cache_modifier=".cg")  # fmt: skip
        b_up = tl.load(b_up_row + f[:, None] * up_stride, mask=f_mask & r_up[None, :], other=0.0,
                       cache_modifier=".cg")  # fmt: skip
        wait_for_data(PDL)
        s_gate = tl.load(s_gate_ptrs[:, None] + r[None, :], mask=gate_mask, other=0.0)
        s_up = tl.load(s_up_ptrs[:, None] + r[None, :], mask=up_mask, other=0.0)
        _add_and_activate(gate_up_ptr, act_ptr, pos, row_mask, f, s_gate, s_up, b_gate, b_up, alpha, limit, F, GATED,
                          INTERLEAVED, ACTIVATION)  # fmt: skip
    else:
        wait_for_data(PDL)
        s_gate = tl.load(s_gate_ptrs[:, None] + r[None, :], mask=gate_mask, other=0.0)
        s_up = tl.load(s_up_ptrs[:, None] + r[None, :], mask=up_mask, other=0.0)
        for f0 in tl.range(first, last, BLOCK_F, num_stages=STAGES):
            f = f0 + tl.arange(0, BLOCK_F)
            f_mask = (f < F)[:, None]
            b_gate = tl.load(b_gate_row + f[:, None] * gate_stride, mask=f_mask & r_gate[None, :], other=0.0)
            b_up = tl.load(b_up_row + f[:, None] * up_stride, mask=f_mask & r_up[None, :], other=0.0)
            _add_and_activate(gate_up_ptr, act_ptr, pos, row_mask, f, s_gate, s_up, b_gate, b_up, alpha, limit, F,
                              GATED, INTERLEAVED, ACTIVATION)  # fmt: skip


@triton.jit(do_not_specialize=["num_experts", "slots_1", "num_rows"])
def activation_kernel(gate_up_ptr, act_ptr, s_ptr, route, table, num_experts, slots_1, num_rows, s_stride, alpha, limit,
                      F: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ACTIVATION: tl.constexpr,
                      HAS_LORA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, SPAN_F: tl.constexpr,
                      BLOCK_R: tl.constexpr, STAGES: tl.constexpr, DIRECT: tl.constexpr,
                      PDL: tl.constexpr):  # fmt: skip
    """act[pos, f] = activation(gate + s_gate B_gate^T, up + s_up B_up^T): one pair tile, SPAN_F columns a program.

    gate_up [n, 2F or F] and act [n, F] by position; s [2, n, s_stride]: scaled shrink results of gate and up (one for
    both where they share A, that is where the table holds the same address twice). The usual case, ranks that are
    multiples of 8 and fit one rank block (of NARROW_RANK, or of the table's widest), looks everything up once and then
    streams B. Route, table and the B of a single column tile are read before the wait for the GEMM.
    """
    let_next_launch(PDL)
    CACHE: tl.constexpr = ".cg"
    bin_id, start, count = pair_tile(route, tl.program_id(1), num_experts, slots_1, DIRECT, CACHE)
    if count > 0:
        dtype: tl.constexpr = act_ptr.dtype.element_ty
        m = tl.arange(0, BLOCK_M)
        row_mask = m < count
        pos = (start + m).to(tl.int64)
        first = tl.program_id(0) * SPAN_F
        last = tl.minimum(first + SPAN_F, F)
        slot = bin_id % slots_1 - 1
        if HAS_LORA and slot >= 0:
            record = (slot * num_experts + bin_id // slots_1) * 3
            gate_rank = tl.load(table.lora_rank + record, cache_modifier=CACHE)
            up_rank = tl.load(table.lora_rank + record + 1, cache_modifier=CACHE)
            gate_b = tl.load(table.b_address + record, cache_modifier=CACHE)
            up_b = tl.load(table.b_address + record + 1, cache_modifier=CACHE)
            gate_a = tl.load(table.a_address + record, cache_modifier=CACHE)
            shared_a = gate_a == tl.load(table.a_address + record + 1, cache_modifier=CACHE)
            b_step = tl.where(shared_a & INTERLEAVED, 2, 1)
            s_gate_ptrs = s_ptr + pos * s_stride
            s_up_ptrs = s_gate_ptrs + tl.where(shared_a, 0, num_rows).to(tl.int64) * s_stride
            widest = tl.maximum(gate_rank, up_rank)
            if (gate_rank % 8 == 0) & (up_rank % 8 == 0) & (widest <= BLOCK_R):
                if BLOCK_R > NARROW_RANK and widest <= NARROW_RANK:
                    _in_one_block(gate_up_ptr, act_ptr, s_gate_ptrs, s_up_ptrs, gate_b, up_b, gate_rank, up_rank,
                                  b_step, pos, row_mask, first, last, alpha, limit, F, GATED, INTERLEAVED, ACTIVATION,
                                  BLOCK_F, SPAN_F, NARROW_RANK, STAGES, PDL)  # fmt: skip
                else:
                    _in_one_block(gate_up_ptr, act_ptr, s_gate_ptrs, s_up_ptrs, gate_b, up_b, gate_rank, up_rank,
                                  b_step, pos, row_mask, first, last, alpha, limit, F, GATED, INTERLEAVED, ACTIVATION,
                                  BLOCK_F, SPAN_F, BLOCK_R, STAGES, PDL)  # fmt: skip
            else:
                wait_for_data(PDL)
                for f0 in range(first, last, BLOCK_F):
                    f = f0 + tl.arange(0, BLOCK_F)
                    f_mask = f < F
                    mask = row_mask[:, None] & f_mask[None, :]
                    gate, up = _load_gate_up(gate_up_ptr, pos, f, mask, F, GATED, INTERLEAVED)
                    gate = expand(gate, s_gate_ptrs, row_mask, gate_b, f, b_step, f_mask, gate_rank, BLOCK_R, dtype)
                    up = expand(up, s_up_ptrs, row_mask, up_b, f, b_step, f_mask, up_rank, BLOCK_R, dtype)
                    out = activate(gate, up, alpha, limit, ACTIVATION).to(dtype)
                    tl.store(act_ptr + pos[:, None] * F + f[None, :], out, mask=mask)
        else:
            wait_for_data(PDL)
            for f0 in range(first, last, BLOCK_F):
                f = f0 + tl.arange(0, BLOCK_F)
                mask = row_mask[:, None] & (f < F)[None, :]
                gate, up = _load_gate_up(gate_up_ptr, pos, f, mask, F, GATED, INTERLEAVED)
                out = activate(gate, up, alpha, limit, ACTIVATION).to(dtype)
                tl.store(act_ptr + pos[:, None] * F + f[None, :], out, mask=mask)
    else:
        wait_for_data(PDL)
