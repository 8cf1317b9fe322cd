"""Rotary position embedding of queries and keys in one launch, rounded as torch rounds it op by op.

Semantics: out = x * cos + rotate_half(x) * sin over the first R elements of a head, rotate_half(x)[i] = -x[i + R/2] for
i < R/2 and x[i - R/2] else; the elements from R on pass through.

Example: R = 4, D = 5, x = [1, 2, 3, 4, 5], cos = [0, 0, 0, 0], sin = [1, 1, 1, 1]: out = [-3, -4, 1, 2, 5].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


@triton.jit
def _rotate(x_ptr, out_ptr, cos_row, sin_row, head, head_mask, x_stride, out_stride, R: tl.constexpr, D: tl.constexpr,
            BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """The heads of one token. Products and sum are rounded to the model's dtype one by one."""
    HALF: tl.constexpr = R // 2
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    i = tl.arange(0, BLOCK_R)
    mask = head_mask[:, None] & (i < HALF)[None, :]
    x_rows = x_ptr + (head * x_stride)[:, None] + i[None, :]
    out_rows = out_ptr + (head * out_stride)[:, None] + i[None, :]
    low = tl.load(x_rows, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x_rows + HALF, mask=mask, other=0.0).to(tl.float32)
    cos_low = tl.load(cos_row + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos_row + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin_row + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin_row + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    new_low = (low * cos_low).to(dtype).to(tl.float32) + (-high * sin_low).to(dtype).to(tl.float32)
    new_high = (high * cos_high).to(dtype).to(tl.float32) + (low * sin_high).to(dtype).to(tl.float32)
    tl.store(out_rows, new_low.to(dtype), mask=mask)
    tl.store(out_rows + HALF, new_high.to(dtype), mask=mask)
    if D > R:
        d = tl.arange(0, BLOCK_D)
        rest = head_mask[:, None] & (d < D - R)[None, :]
        x_rows = x_ptr + (head * x_stride)[:, None] + (R + d)[None, :]
        out_rows = out_ptr + (head * out_stride)[:, None] + (R + d)[None, :]
        tl.store(out_rows, tl.load(x_rows, mask=rest), mask=rest)


@triton.jit(do_not_specialize=["num_tokens"])
def _rotary_kernel(q, k, cos, sin, num_tokens, HQ: tl.constexpr, HK: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
                   BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """BLOCK_H heads of q or, in the programs after those, of k, of one token of one sequence."""
    batch = (tl.program_id(0) // num_tokens).to(tl.int64)
    token = (tl.program_id(0) % num_tokens).to(tl.int64)
    block = tl.program_id(1)
    Q_BLOCKS: tl.constexpr = (HQ + BLOCK_H - 1) // BLOCK_H
    cos_row = cos.data + batch * cos.batch_stride + token * cos.token_stride
    sin_row = sin.data + batch * sin.batch_stride + token * sin.token_stride
    if block < Q_BLOCKS:
        head = block * BLOCK_H + tl.arange(0, BLOCK_H)
        x = q.data + batch * q.batch_stride + token * q.token_stride
        out = q.out + batch * q.out_batch_stride + token * q.out_token_stride
        _rotate(x, out, cos_row, sin_row, head, head < HQ, q.head_stride, q.out_head_stride, R, D, BLOCK_R, BLOCK_D)
    else:
        head = (block - Q_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
        x = k.data + batch * k.batch_stride + token * k.token_stride
        out = k.out + batch * k.out_batch_stride + token * k.out_token_stride
        _rotate(x, out, cos_row, sin_row, head, head < HK, k.head_stride, k.out_head_stride, R, D, BLOCK_R, BLOCK_D)


class _Strided(NamedTuple):
    """Queries or keys and what replaces them, with strides in elements, as the kernel takes them."""

    data: torch.Tensor
    out: torch.Tensor
    batch_stride: int
    head_stride: int
    token_stride: int
    out_batch_stride: int
    out_head_stride: int
    out_token_stride: int


class _Angles(NamedTuple):
    """cos or sin, with strides in elements."""

    data: torch.Tensor
    batch_stride: int
    token_stride: int


def _check(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """q and k as [batch, heads, tokens, D]."""
    batch, _, tokens, width = q.shape
    if (k.shape[0], k.shape[2], k.shape[3]) != (batch, tokens, width) or q.stride(3) != 1 or k.stride(3) != 1:
        raise ValueError(
            f"expected q and k of contiguous heads, alike but for their number, got {tuple(q.shape)}, {tuple(k.shape)}"
        )
    if cos.shape != sin.shape or cos.dim() != 3 or cos.shape[0] not in (1, batch) or cos.shape[1] != tokens:
        raise ValueError(
            f"expected cos and sin of [{batch} or 1, {tokens}, R], got {tuple(cos.shape)}, {tuple(sin.shape)}"
        )
    rotated = cos.shape[2]
    if rotated % 2 or rotated > width or cos.stride(2) != 1 or sin.stride(2) != 1:
        raise ValueError(f"expected cos and sin of an even width, {width} at most, contiguous, got {rotated}")
    if not q.dtype == k.dtype == cos.dtype == sin.dtype:
        raise ValueError(f"expected one dtype, got q {q.dtype}, k {k.dtype}, cos {cos.dtype}, sin {sin.dtype}")


def _strided(x: torch.Tensor, out: torch.Tensor) -> _Strided:
    return _Strided(x, out, *x.stride()[:3], *out.stride()[:3])


def _angles(x: torch.Tensor) -> _Angles:
    return _Angles(x, x.stride(0) if x.shape[0] > 1 else 0, x.stride(1))


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotated q and k; launches only, never waits. The signature is that of transformers' apply_rotary_pos_emb.

    Args:
        q: [batch, Hq, tokens, D], or [batch, tokens, Hq, D] with unsqueeze_dim 2; any strides, heads contiguous.
        k: the same with Hk heads.
        cos: [batch or 1, tokens, R], q's dtype; R even, D at most.
        sin: the same.
        unsqueeze_dim: where the heads are.

    Returns:
        (q, k) anew, in the memory order of the inputs where those are dense.

    Raises:
        ValueError: a shape, dtype or stride does not fit.
    """
    new_q, new_k = torch.empty_like(q), torch.empty_like(k)
    heads_first = (0, 1, 2, 3) if unsqueeze_dim == 1 else (0, 2, 1, 3)
    q_BHTD, k_BHTD, new_q_BHTD, new_k_BHTD = (x.permute(heads_first) for x in (q, k, new_q, new_k))
    _check(q_BHTD, k_BHTD, cos, sin)
    (batch, q_heads, tokens, width), k_heads, rotated = q_BHTD.shape, k_BHTD.shape[1], cos.shape[2]
    if q.numel() == 0:
        return new_q, new_k
    block_h = 8
    _rotary_kernel[(batch * tokens, triton.cdiv(q_heads, block_h) + triton.cdiv(k_heads, block_h))](
        _strided(q_BHTD, new_q_BHTD), _strided(k_BHTD, new_k_BHTD), _angles(cos), _angles(sin), tokens, HQ=q_heads,
        HK=k_heads, R=rotated, D=width, BLOCK_H=block_h, BLOCK_R=triton.next_power_of_2(rotated // 2),
        BLOCK_D=triton.next_power_of_2(max(width - rotated, 1)), num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip
    return new_q, new_k


def rotary_reference(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """What rotary computes, op by op, with the same rounding points."""
    rotated = cos.shape[2]
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        low, high = x[..., : rotated // 2], x[..., rotated // 2 : rotated]
        turned = x[..., :rotated] * cos + torch.cat([-high, low], dim=-1) * sin
        return torch.cat([turned, x[..., rotated:]], dim=-1)

    return rotate(q), rotate(k)
