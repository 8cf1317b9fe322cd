"""Activation between the GEMMs, with the gate and up deltas of LoRA added on the way (split path)."""

from __future__ import annotations

import triton
import triton.language as tl

from compute_worker.kernels.layout import Activation
from compute_worker.kernels.lora import aligned_pointer, expand, wait_for_previous

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
def _add_gate_up(gate, up, s_gate_ptrs, s_up_ptrs, row_mask, record, table, f, f_mask, b_step, BLOCK_R: tl.constexpr,
                 DTYPE: tl.constexpr):  # fmt: skip
    """gate and up with their deltas; the usual case, small ranks that are multiples of 8, loads everything up front."""
    gate_rank = tl.load(table.lora_rank + record)
    up_rank = tl.load(table.lora_rank + record + 1)
    gate_b = tl.load(table.b_address + record)
    up_b = tl.load(table.b_address + record + 1)
    if (gate_rank % 8 == 0) & (up_rank % 8 == 0) & (gate_rank <= BLOCK_R) & (up_rank <= BLOCK_R):
        r = tl.arange(0, BLOCK_R)
        r_gate = r < gate_rank
        r_up = r < up_rank
        b_gate_ptrs = aligned_pointer(gate_b, DTYPE) + f[:, None] * (b_step * ((gate_rank // 8) * 8)) + r[None, :]
        b_up_ptrs = aligned_pointer(up_b, DTYPE) + f[:, None] * (b_step * ((up_rank // 8) * 8)) + r[None, :]
        b_gate = tl.load(b_gate_ptrs, mask=f_mask[:, None] & r_gate[None, :], other=0.0)
        b_up = tl.load(b_up_ptrs, mask=f_mask[:, None] & r_up[None, :], other=0.0)
        s_gate = tl.load(s_gate_ptrs[:, None] + r[None, :], mask=row_mask[:, None] & r_gate[None, :], other=0.0)
        s_up = tl.load(s_up_ptrs[:, None] + r[None, :], mask=row_mask[:, None] & r_up[None, :], other=0.0)
        gate = tl.dot(s_gate, tl.trans(b_gate), gate)
        up = tl.dot(s_up, tl.trans(b_up), up)
    else:
        gate = expand(gate, s_gate_ptrs, row_mask, gate_b, f, b_step, f_mask, gate_rank, BLOCK_R, DTYPE)
        up = expand(up, s_up_ptrs, row_mask, up_b, f, b_step, f_mask, up_rank, BLOCK_R, DTYPE)
    return gate, up


@triton.jit(do_not_specialize=["num_experts", "slots_1", "num_rows"])
def activation_kernel(gate_up_ptr, act_ptr, s_ptr, route, table, num_experts, slots_1, num_rows, s_stride, alpha, limit,
                      F: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ACTIVATION: tl.constexpr,
                      HAS_LORA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_R: tl.constexpr,
                      PDL: tl.constexpr):  # fmt: skip
    """act[pos, f] = activation(gate + s_gate B_gate^T, up + s_up B_up^T) of one pair tile.

    gate_up [n, 2F or F] and act [n, F] by position; s [2, n, s_stride]: scaled shrink results of gate and up (one for
    both where they share A, that is where the table holds the same address twice).
    """
    wait_for_previous(PDL)
    entry = tl.program_id(1)
    # All of these are inside their arrays whether or not there is a tile, so that no load waits for another.
    num_entries = tl.load(route.header + 1)
    count = tl.load(route.pair_count + entry)
    bin_id = tl.load(route.pair_bin + entry)
    start = tl.load(route.pair_start + entry)
    if (entry < num_entries) & (count > 0):
        m = tl.arange(0, BLOCK_M)
        row_mask = m < count
        pos = (start + m).to(tl.int64)
        f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
        f_mask = f < F
        mask = row_mask[:, None] & f_mask[None, :]
        if GATED:
            gate_col = 2 * f if INTERLEAVED else f
            up_col = 2 * f + 1 if INTERLEAVED else F + f
            row_ptrs = gate_up_ptr + pos[:, None] * (2 * F)
            gate = tl.load(row_ptrs + gate_col[None, :], mask=mask, other=0.0).to(tl.float32)
            up = tl.load(row_ptrs + up_col[None, :], mask=mask, other=0.0).to(tl.float32)
        else:
            up = tl.load(gate_up_ptr + pos[:, None] * F + f[None, :], mask=mask, other=0.0).to(tl.float32)
            gate = up
        if HAS_LORA:
            slot = bin_id % slots_1 - 1
            if slot >= 0:
                record = (slot * num_experts + bin_id // slots_1) * 3
                shared_a = tl.load(table.a_address + record) == tl.load(table.a_address + record + 1)
                s_gate = s_ptr + pos * s_stride
                s_up = s_gate + tl.where(shared_a, 0, num_rows).to(tl.int64) * s_stride
                gate, up = _add_gate_up(gate, up, s_gate, s_up, row_mask, record, table, f, f_mask,
                                        tl.where(shared_a & INTERLEAVED, 2, 1), BLOCK_R,
                                        act_ptr.dtype.element_ty)  # fmt: skip
        out = activate(gate, up, alpha, limit, ACTIVATION)
        tl.store(act_ptr + pos[:, None] * F + f[None, :], out.to(act_ptr.dtype.element_ty), mask=mask)
