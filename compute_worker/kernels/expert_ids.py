"""Small integer work around the experts, one launch each: which copy of an expert a row takes, and rows by slot.

Legend: T tokens, K experts a token, E logical experts, C copies of an expert at most, S local slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 256


@triton.jit(do_not_specialize=["num_ids", "shift"])
def choose_copies_kernel(expert_ptr, copies_ptr, num_copies_ptr, num_rows_ptr, out_ptr, num_ids, shift,
                         TOP_K: tl.constexpr, MAX_COPIES: tl.constexpr, HAS_NUM_ROWS: tl.constexpr,
                         BLOCK: tl.constexpr):  # fmt: skip
    """See choose_copies."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_ids
    token = i // TOP_K
    expert = tl.load(expert_ptr + i, mask=inside, other=-1).to(tl.int64)
    chosen = inside & (expert >= 0)
    if HAS_NUM_ROWS:
        chosen = chosen & (token < tl.load(num_rows_ptr))
    copy = (token + shift) % tl.load(num_copies_ptr + expert, mask=chosen, other=1)
    physical = tl.load(copies_ptr + expert * MAX_COPIES + copy, mask=chosen, other=-1)
    tl.store(out_ptr + i, physical, mask=inside)


def choose_copies(
    expert_TK: torch.Tensor,
    copies_EC: torch.Tensor,
    num_copies_E: torch.Tensor,
    *,
    shift: int,
    num_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Physical experts int64 [T, K]: token t takes copy (shift + t) modulo the number of copies; -1 stays.

    expert_TK: int32 or int64, logical, contiguous. copies_EC, num_copies_E: int64. num_rows: int64 [1] on the device;
    tokens from there on are padding and choose nothing; None: none is.
    """
    num_tokens, top_k = expert_TK.shape
    out_TK = torch.empty((num_tokens, top_k), dtype=torch.int64, device=expert_TK.device)
    if num_tokens:
        choose_copies_kernel[(triton.cdiv(num_tokens * top_k, _BLOCK),)](
            expert_TK, copies_EC, num_copies_E, out_TK if num_rows is None else num_rows, out_TK, num_tokens * top_k,
            shift, TOP_K=top_k, MAX_COPIES=copies_EC.shape[1], HAS_NUM_ROWS=num_rows is not None, BLOCK=_BLOCK,
        )  # fmt: skip
    return out_TK


@triton.jit(do_not_specialize=["num_ids"])
def count_rows_kernel(slot_ptr, adapter_ptr, count_ptr, num_ids, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
                      BLOCK: tl.constexpr):  # fmt: skip
    """See count_rows."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_ids
    slot = tl.load(slot_ptr + i, mask=inside, other=-1)
    adapter = tl.load(adapter_ptr + i // TOP_K, mask=inside, other=-1)
    place = (adapter + 1) * WIDTH + slot + 1
    tl.atomic_add(count_ptr + place, tl.full([BLOCK], 1, tl.int64), mask=inside, sem="relaxed")


def count_rows(slot_NK: torch.Tensor, adapter_slot_N: torch.Tensor, counts: torch.Tensor, *, width: int) -> None:
    """counts[(adapter_slot + 1) * width + slot + 1] += 1 for every row, in place.

    slot_NK: int64, -1 to width - 2, contiguous. adapter_slot_N: int32 or int64, from -1, contiguous. counts: int64.
    """
    if slot_NK.numel():
        grid = (triton.cdiv(slot_NK.numel(), _BLOCK),)
        count_rows_kernel[grid](
            slot_NK, adapter_slot_N, counts, slot_NK.numel(), TOP_K=slot_NK.shape[1], WIDTH=width, BLOCK=_BLOCK
        )
