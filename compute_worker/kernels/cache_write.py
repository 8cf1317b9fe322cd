"""New keys and values into the paged cache, one launch for both.

Legend: T tokens, H key/value heads, Dk and Dv their widths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["k_stride_h", "k_stride_t", "v_stride_h", "v_stride_t"])
def write_kv_kernel(k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, k_stride_h, k_stride_t, v_stride_h, v_stride_t,
                    K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
                    K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr):  # fmt: skip
    """One token: all heads of its key and value."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    i = tl.arange(0, K_BLOCK)
    key = tl.load(k_ptr + token * k_stride_t + i // K_DIM * k_stride_h + i % K_DIM, mask=i < K_WIDTH)
    tl.store(k_cache_ptr + slot * K_WIDTH + i, key, mask=i < K_WIDTH)
    j = tl.arange(0, V_BLOCK)
    value = tl.load(v_ptr + token * v_stride_t + j // V_DIM * v_stride_h + j % V_DIM, mask=j < V_WIDTH)
    tl.store(v_cache_ptr + slot * V_WIDTH + j, value, mask=j < V_WIDTH)


def write_kv(
    k_HTD: torch.Tensor, v_HTD: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_T: torch.Tensor
) -> None:
    """k_cache[slot_T] = k, v_cache[slot_T] = v, in place.

    k_HTD: [H, T, Dk], v_HTD: [H, T, Dv], any strides but 1 for the last dim. Caches: [slots, H, Dk] and [slots, H, Dv],
    contiguous, of the same dtype. slot_T: int64 [T]. Of two tokens of one slot either may win.
    """
    heads, num_tokens, k_dim = k_HTD.shape
    v_dim = v_HTD.shape[2]
    assert k_HTD.stride(2) == v_HTD.stride(2) == 1, (k_HTD.stride(), v_HTD.stride())
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    if num_tokens:
        write_kv_kernel[(num_tokens,)](
            k_HTD, v_HTD, k_cache, v_cache, slot_T, k_HTD.stride(0), k_HTD.stride(1), v_HTD.stride(0), v_HTD.stride(1),
            K_DIM=k_dim, V_DIM=v_dim, K_WIDTH=heads * k_dim, V_WIDTH=heads * v_dim,
            K_BLOCK=triton.next_power_of_2(heads * k_dim), V_BLOCK=triton.next_power_of_2(heads * v_dim),
        )  # fmt: skip
