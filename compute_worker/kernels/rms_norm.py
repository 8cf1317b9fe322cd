"""RMS norm of rows in one launch, with the rounding points of the models that use it.

Semantics: y[i] = weight * x[i] / sqrt(mean over d of x[i, d]^2 + eps). Models differ in where they round: most round
the normalised row to x's dtype before they multiply by the weight (Qwen3, Mixtral, DeepSeek), some after (gpt-oss).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "inner"])
def _rms_norm_kernel(x_ptr, weight_ptr, y_ptr, num_rows, inner, outer_stride, inner_stride, eps, D: tl.constexpr,
                     ROUND_FIRST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """BLOCK_M rows; row i of x starts at (i // inner) * outer_stride + (i % inner) * inner_stride, y is contiguous."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    mask = (row < num_rows)[:, None] & (d < D)[None, :]
    start = (row // inner).to(tl.int64) * outer_stride + (row % inner) * inner_stride
    x = tl.load(x_ptr + start[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    variance = tl.sum(x * x, 1) / D
    normalised = x * tl.rsqrt(variance + eps)[:, None]
    if ROUND_FIRST:
        normalised = normalised.to(x_ptr.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    y = (normalised * weight[None, :]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row.to(tl.int64)[:, None] * D + d[None, :], y, mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, round_first: bool = True) -> torch.Tensor:
    """Normalises the last dim; launches only, never waits.

    Args:
        x: [..., D], float of any kind, elements of a row contiguous; leading dims at any strides.
        weight: [D], contiguous.
        eps: added to the mean square.
        round_first: round to x's dtype before multiplying by the weight; the result is then of the dtype that x and
            weight promote to. Else round once, to x's dtype.

    Returns:
        Contiguous, of x's shape. Sums are fp32.

    Raises:
        ValueError: a shape or stride does not fit.
    """
    width = x.shape[-1]
    if tuple(weight.shape) != (width,) or not weight.is_contiguous() or x.stride(-1) != 1:
        raise ValueError(
            f"expected x of contiguous rows and a contiguous weight [{width}], got x {tuple(x.shape)} of strides "
            f"{x.stride()} and weight {tuple(weight.shape)}"
        )
    dtype = torch.promote_types(x.dtype, weight.dtype) if round_first else x.dtype
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    rows = x.numel() // width
    if rows == 0:
        return y
    # Two strides describe [T, H, D] parts of a wider projection; what they cannot describe is copied by reshape.
    x_OID = x.reshape(-1, x.shape[-2] if x.dim() > 2 else 1, width)
    block_d = triton.next_power_of_2(width)
    block_m = max(1, 1024 // block_d)
    _rms_norm_kernel[(triton.cdiv(rows, block_m),)](
        x_OID, weight, y, rows, x_OID.shape[1], x_OID.stride(0), x_OID.stride(1), eps, D=width, ROUND_FIRST=round_first,
        BLOCK_M=block_m, BLOCK_D=block_d, num_warps=4 if block_d <= 4096 else 8,
    )  # fmt: skip
    return y


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float, *, round_first: bool = True) -> torch.Tensor:
    """What rms_norm computes, op by op, with the same rounding points."""
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if round_first:
        return weight * normalised.to(x.dtype)
    return (weight.float() * normalised).to(x.dtype)
