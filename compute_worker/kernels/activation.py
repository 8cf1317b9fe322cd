"""Activation between the GEMMs, with the gate and up deltas of LoRA added on the way (split path)."""

from __future__ import annotations

import triton
import triton.language as tl

from compute_worker.kernels.layout import Activation
from compute_worker.kernels.lora import expand

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


@triton.jit(do_not_specialize=["num_experts", "slots_1", "num_rows"])
def activation_kernel(gate_up_ptr, act_ptr, s_ptr, route, table, num_experts, slots_1, num_rows, s_stride, alpha, limit,
                      F: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ACTIVATION: tl.constexpr,
                      HAS_LORA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
                      BLOCK_R: tl.constexpr):  # fmt: skip
    """act[pos, f] = activation(gate + scale * s_gate B_gate^T, up + scale * s_up B_up^T) of one pair tile.

    gate_up [n, 2F or F] and act [n, F] by position; s [2, n, s_stride]: shrink results of gate and up (one for both
    where they share A, that is where the table holds the same address twice).
    """
    entry = tl.program_id(1)
    if entry < tl.load(route.header + 1):
        count = tl.load(route.pair_count + entry)
        if count > 0:
            bin_id = tl.load(route.pair_bin + entry)
            m = tl.arange(0, BLOCK_M)
            row_mask = m < count
            pos = tl.load(route.pair_start + entry) + m
            f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
            f_mask = f < F
            mask = row_mask[:, None] & f_mask[None, :]
            if GATED:
                gate_col = 2 * f if INTERLEAVED else f
                up_col = 2 * f + 1 if INTERLEAVED else F + f
                row_ptrs = gate_up_ptr + pos.to(tl.int64)[:, None] * (2 * F)
                gate = tl.load(row_ptrs + gate_col[None, :], mask=mask, other=0.0).to(tl.float32)
                up = tl.load(row_ptrs + up_col[None, :], mask=mask, other=0.0).to(tl.float32)
            else:
                row_ptrs = gate_up_ptr + pos.to(tl.int64)[:, None] * F
                up = tl.load(row_ptrs + f[None, :], mask=mask, other=0.0).to(tl.float32)
                gate = up
            if HAS_LORA:
                slot = bin_id % slots_1 - 1
                if slot >= 0:
                    record = (slot * num_experts + bin_id // slots_1) * 3
                    gate_rank = tl.load(table.lora_rank + record)
                    up_rank = tl.load(table.lora_rank + record + 1)
                    shared_a = tl.load(table.a_address + record) == tl.load(table.a_address + record + 1)
                    b_step = tl.where(shared_a & INTERLEAVED, 2, 1)
                    s_row = pos.to(tl.int64) * s_stride
                    up_row = s_row + tl.where(shared_a, 0, num_rows).to(tl.int64) * s_stride
                    dtype: tl.constexpr = act_ptr.dtype.element_ty
                    gate_delta = expand(s_ptr + s_row, row_mask, tl.load(table.b_address + record), f, b_step, f_mask,
                                        gate_rank, BLOCK_M, BLOCK_F, BLOCK_R, dtype)  # fmt: skip
                    up_delta = expand(s_ptr + up_row, row_mask, tl.load(table.b_address + record + 1), f, b_step,
                                      f_mask, up_rank, BLOCK_M, BLOCK_F, BLOCK_R, dtype)  # fmt: skip
                    gate += gate_delta * tl.load(table.scale + record)
                    up += up_delta * tl.load(table.scale + record + 1)
            out = activate(gate, up, alpha, limit, ACTIVATION)
            tl.store(act_ptr + pos.to(tl.int64)[:, None] * F + f[None, :], out.to(act_ptr.dtype.element_ty), mask=mask)
