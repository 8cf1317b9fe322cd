"""Attention of one new token per sequence over a paged key/value cache.

Two launches whose grids depend on shapes only, so a captured CUDA graph is right for every kv_len and block table. The
first gives each program one part of one sequence's positions and all query heads of one key/value head (so keys and
values are read once); the second merges the parts. Positions come in blocks: position p of sequence s lies in cache
slot block_table[s, p // block_size] * block_size + p % block_size.

Legend: S sequences, B blocks of the table, Hq / Hkv query and key/value heads, G = Hq / Hkv, C positions of a step,
Dk / Dv width of a key / value head, P parts of a sequence.

Example: kv_len 300, window 0, P = 4, parts of 128 positions at least: parts [0, 128), [128, 256), [256, 300); the
fourth program has nothing to do. With window 100 one part: [200, 300).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

TARGET_PROGRAMS = 528
"""Programs of the first launch, about: 4 for each of 132 multiprocessors. A constant, so that the parts, and with them
the bits of a result, are the same on every GPU."""
MIN_PART = 128
"""Positions of a part at least, a multiple of every BLOCK_C."""
MAX_HEAD_DIM = 256
_STAGES = 5
"""Deep enough for two buffers of keys and values: their loads wait for those of the block table, stages ahead."""
_LOG2_E = math.log2(math.e)


@triton.jit
def _visible_part(kv_len, SPLITS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr,
                  MIN_POSITIONS: tl.constexpr):  # fmt: skip
    """(first position that the token at kv_len - 1 sees, positions of a part)."""
    first = kv_len * 0
    if WINDOW > 0:
        first = tl.maximum(kv_len - WINDOW, first)
    if CHUNK > 0:
        first = tl.maximum((kv_len - 1) // CHUNK * CHUNK, first)
    part = (kv_len - first + SPLITS - 1) // SPLITS
    part = (part + BLOCK_C - 1) // BLOCK_C * BLOCK_C
    return first, tl.maximum(part, MIN_POSITIONS)


@triton.jit
def _normaliser(top, total, sink):
    """Factor of the weighted values: 1 / sum of exp2(score - top), the sink's score among them; sink -inf: none."""
    new_top = tl.maximum(top, sink)
    scale = tl.exp2(top - new_top)
    return scale / (total * scale + tl.exp2(sink - new_top))


@triton.jit(do_not_specialize=["table_stride"])
def _attend_kernel(q_ptr, k_ptr, v_ptr, table_ptr, kv_len_ptr, sink_ptr, out_ptr, top_ptr, total_ptr, table_stride,
                   q_stride_s, q_stride_h, score_scale, HQ: tl.constexpr, HKV: tl.constexpr, DK: tl.constexpr,
                   DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
                   CHUNK: tl.constexpr, MIN_POSITIONS: tl.constexpr, HAS_SINK: tl.constexpr, BLOCK_G: tl.constexpr,
                   BLOCK_C: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
                   STAGES: tl.constexpr):  # fmt: skip
    """One part of one sequence for the G query heads of one key/value head; fp32 softmax in powers of two.

    SPLITS > 1: out [S, Hq, P, Dv] is the fp32 sum of exp2(score - top) v, beside top and total (the sum without v),
    [S, Hq, P]. SPLITS == 1: out [S, Hq, Dv] is the result.
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    GROUP: tl.constexpr = HQ // HKV
    kv_len = tl.load(kv_len_ptr + sequence)
    first, part = _visible_part(kv_len, SPLITS, WINDOW, CHUNK, BLOCK_C, MIN_POSITIONS)
    start = first + split * part
    end = tl.minimum(start + part, kv_len)
    g = tl.arange(0, BLOCK_G)
    c = tl.arange(0, BLOCK_C)
    dk = tl.arange(0, BLOCK_DK)
    dv = tl.arange(0, BLOCK_DV)
    query_head = head * GROUP + g
    row = sequence.to(tl.int64) * HQ + query_head
    if (start < end) | (SPLITS == 1):
        q_ptrs = q_ptr + sequence.to(tl.int64) * q_stride_s + (query_head * q_stride_h)[:, None] + dk[None, :]
        q = tl.load(q_ptrs, mask=(g < GROUP)[:, None] & (dk < DK)[None, :], other=0.0)
        top = tl.full([BLOCK_G], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        acc = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
        table_row = table_ptr + sequence.to(tl.int64) * table_stride
        for c0 in tl.range(start, end, BLOCK_C, num_stages=STAGES):
            position = c0 + c
            seen = position < end
            block = tl.load(table_row + position // BLOCK_SIZE, mask=seen, other=0)
            slot_head = (block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE) * HKV + head
            # Masked rows count as zeros: what lies past a sequence's end may be no number, and 0 * NaN is NaN.
            k_mask = seen[:, None] if DK == BLOCK_DK else seen[:, None] & (dk < DK)[None, :]
            k_CD = tl.load(k_ptr + slot_head[:, None] * DK + dk[None, :], mask=k_mask, other=0.0)
            score = tl.dot(q, tl.trans(k_CD), input_precision="ieee") * score_scale
            score = tl.where(seen[None, :], score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            weight = tl.exp2(score - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(weight, 1)
            v_mask = seen[:, None] if DV == BLOCK_DV else seen[:, None] & (dv < DV)[None, :]
            v_CD = tl.load(v_ptr + slot_head[:, None] * DV + dv[None, :], mask=v_mask, other=0.0)
            acc = tl.dot(weight.to(v_CD.dtype), v_CD, acc * shrink[:, None], input_precision="ieee")
            top = new_top
        mask = (g < GROUP)[:, None] & (dv < DV)[None, :]
        if SPLITS == 1:
            sink = tl.full([BLOCK_G], float("-inf"), tl.float32)
            if HAS_SINK:
                sink = tl.load(sink_ptr + query_head, mask=g < GROUP, other=0.0).to(q.dtype).to(tl.float32)
                sink = sink * 1.4426950408889634
            out = tl.where(kv_len > 0, acc * _normaliser(top, total, sink)[:, None], 0.0)
            tl.store(out_ptr + row[:, None] * DV + dv[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            row = row * SPLITS + split
            tl.store(out_ptr + row[:, None] * DV + dv[None, :], acc, mask=mask)
            tl.store(top_ptr + row, top, mask=g < GROUP)
            tl.store(total_ptr + row, total, mask=g < GROUP)


@triton.jit
def _merge_kernel(part_ptr, top_ptr, total_ptr, kv_len_ptr, sink_ptr, out_ptr, HQ: tl.constexpr, DV: tl.constexpr,
                  SPLITS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, MIN_POSITIONS: tl.constexpr,
                  HAS_SINK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
                  BLOCK_DV: tl.constexpr):  # fmt: skip
    """out[s, h] from the parts that had positions, BLOCK_P of them at a time, in order."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    kv_len = tl.load(kv_len_ptr + sequence)
    first, part = _visible_part(kv_len, SPLITS, WINDOW, CHUNK, BLOCK_C, MIN_POSITIONS)
    num_parts = (kv_len - first + part - 1) // part
    row = sequence.to(tl.int64) * HQ + head
    dv = tl.arange(0, BLOCK_DV)
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for p0 in range(0, num_parts, BLOCK_P):
        p = p0 + tl.arange(0, BLOCK_P)
        present = p < num_parts
        top_P = tl.load(top_ptr + row * SPLITS + p, mask=present, other=float("-inf"))
        total_P = tl.load(total_ptr + row * SPLITS + p, mask=present, other=0.0)
        part_ptrs = part_ptr + (row * SPLITS + p)[:, None] * DV + dv[None, :]
        part_PD = tl.load(part_ptrs, mask=present[:, None] & (dv < DV)[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(top_P, 0))
        weight_P = tl.exp2(top_P - new_top)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(total_P * weight_P, 0)
        acc = acc * shrink + tl.sum(part_PD * weight_P[:, None], 0)
        top = new_top
    sink = float("-inf")
    if HAS_SINK:
        sink = tl.load(sink_ptr + head).to(out_ptr.dtype.element_ty).to(tl.float32) * 1.4426950408889634
    out = tl.where(kv_len > 0, acc * _normaliser(top, total, sink), 0.0)
    tl.store(out_ptr + row * DV + dv, out.to(out_ptr.dtype.element_ty), mask=dv < DV)


def num_splits(num_sequences: int, num_kv_heads: int, context: int) -> int:
    """Parts that each sequence's positions are cut into, given the most positions that a token can see."""
    wanted = -(-TARGET_PROGRAMS // (num_sequences * num_kv_heads))
    return max(1, min(wanted, -(-context // MIN_PART)))


def _check(
    q_SHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table_SB: torch.Tensor,
    kv_len_S: torch.Tensor,
    sink_H: torch.Tensor | None,
) -> None:
    sequences, num_heads, key_dim = q_SHD.shape
    slots, num_kv_heads, _ = k_cache.shape
    if k_cache.shape[2] != key_dim or v_cache.shape[:2] != (slots, num_kv_heads) or num_heads % num_kv_heads:
        raise ValueError(
            f"caches: expected [slots, Hkv, {key_dim}] and [slots, Hkv, Dv] with Hkv a divisor of {num_heads}, "
            f"got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    if max(key_dim, v_cache.shape[2]) > MAX_HEAD_DIM:
        raise ValueError(f"heads of {key_dim} and {v_cache.shape[2]} elements: expected {MAX_HEAD_DIM} at most")
    if not q_SHD.dtype == k_cache.dtype == v_cache.dtype:
        raise ValueError(f"expected one dtype, got q {q_SHD.dtype}, k {k_cache.dtype}, v {v_cache.dtype}")
    if q_SHD.stride(2) != 1 or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("expected contiguous caches and contiguous heads of q")
    for name, tensor in (("block_table_SB", block_table_SB), ("kv_len_S", kv_len_S)):
        if tensor.dtype != torch.int32 or tensor.shape[0] != sequences or tensor.stride(-1) != 1:
            raise ValueError(
                f"{name}: expected int32 with {sequences} contiguous rows, got {tensor.dtype} {tuple(tensor.shape)}"
            )
    if sink_H is not None and (tuple(sink_H.shape) != (num_heads,) or not sink_H.is_contiguous()):
        raise ValueError(f"sink_H: expected contiguous [{num_heads}], got {tuple(sink_H.shape)}")


def decode_attention(
    q_SHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table_SB: torch.Tensor,
    kv_len_S: torch.Tensor,
    *,
    block_size: int,
    scaling: float,
    window: int = 0,
    chunk: int = 0,
    sink_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scaling * q k) v of each sequence's newest token, over the cache; launches only, never waits.

    Semantics: out[s, h] = sum over p of softmax_p(scaling * q[s, h] . k[slot(s, p), h // G]) * v[slot(s, p), h // G],
    p < kv_len[s] and within the limits; fp32 softmax and sums, weights rounded to the dtype of v.

    Args:
        q_SHD: [S, Hq, Dk], the token at position kv_len[s] - 1; rows may have any strides.
        k_cache: [slots, Hkv, Dk], same dtype, contiguous; the new token's key is in it already.
        v_cache: [slots, Hkv, Dv].
        block_table_SB: int32 [S, B]; entries past a sequence's blocks are not read.
        kv_len_S: int32 [S], at most B * block_size; 0 for padding rows, whose output is zeros.
        block_size: positions of a block.
        scaling: factor of the scores.
        window: sees itself and window - 1 positions before it; 0: no limit.
        chunk: sees only its own chunk of this many positions; 0: no limit.
        sink_H: [Hq], score of one more position whose value is zero.

    Returns:
        [S, Hq, Dv] in q's dtype. A row's bits depend on its own sequence, S and B only.

    Raises:
        ValueError: a shape, dtype or stride does not fit, or a head is wider than MAX_HEAD_DIM.
    """
    _check(q_SHD, k_cache, v_cache, block_table_SB, kv_len_S, sink_H)
    (sequences, num_heads, key_dim), (_, num_kv_heads, value_dim) = q_SHD.shape, v_cache.shape
    out_SHD = torch.empty((sequences, num_heads, value_dim), dtype=q_SHD.dtype, device=q_SHD.device)
    if sequences == 0:
        return out_SHD
    context = min([block_table_SB.shape[1] * block_size, *(limit for limit in (window, chunk) if limit)])
    splits = num_splits(sequences, num_kv_heads, context)
    block_dk, block_dv = (max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    # 16 KiB of keys and as many of values a step: with two buffers of each, three programs fit a multiprocessor.
    block_c = min(MIN_PART, max(16, 16384 // (max(block_dk, block_dv) * q_SHD.element_size())))
    common = {
        "HQ": num_heads, "DV": value_dim, "SPLITS": splits, "WINDOW": window, "CHUNK": chunk, "BLOCK_C": block_c,
        "MIN_POSITIONS": MIN_PART, "HAS_SINK": sink_H is not None, "BLOCK_DV": block_dv,
    }  # fmt: skip
    part_out = part_top = part_total = out_SHD
    if splits > 1:
        parts = (sequences, num_heads, splits)
        part_out = torch.empty((*parts, value_dim), dtype=torch.float32, device=q_SHD.device)
        part_top, part_total = (torch.empty(parts, dtype=torch.float32, device=q_SHD.device) for _ in range(2))
    _attend_kernel[(sequences, num_kv_heads, splits)](
        q_SHD, k_cache, v_cache, block_table_SB, kv_len_S, sink_H, part_out, part_top, part_total,
        block_table_SB.stride(0), q_SHD.stride(0), q_SHD.stride(1), scaling * _LOG2_E, HKV=num_kv_heads, DK=key_dim,
        BLOCK_SIZE=block_size, BLOCK_G=max(16, triton.next_power_of_2(num_heads // num_kv_heads)), BLOCK_DK=block_dk,
        STAGES=_STAGES, num_warps=4, **common,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(sequences, num_heads)](
            part_out, part_top, part_total, kv_len_S, sink_H, out_SHD, BLOCK_P=8, num_warps=1, **common
        )
    return out_SHD


def decode_attention_reference(
    q_SHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table_SB: torch.Tensor,
    kv_len_S: torch.Tensor,
    *,
    block_size: int,
    scaling: float,
    window: int = 0,
    chunk: int = 0,
    sink_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp32 [S, Hq, Dv], sequence by sequence; arguments as in decode_attention."""
    num_heads, (_, num_kv_heads, value_dim) = q_SHD.shape[1], v_cache.shape
    out_SHD = torch.zeros((q_SHD.shape[0], num_heads, value_dim), dtype=torch.float32, device=q_SHD.device)
    for s, kv_len in enumerate(kv_len_S.tolist()):
        first = max(0, kv_len - window if window else 0, (kv_len - 1) // chunk * chunk if chunk else 0)
        position = torch.arange(first, kv_len, device=q_SHD.device)
        slot = block_table_SB[s, position // block_size].long() * block_size + position % block_size
        k_CHD, v_CHD = (
            cache[slot].float().repeat_interleave(num_heads // num_kv_heads, dim=1) for cache in (k_cache, v_cache)
        )
        score_HC = scaling * torch.einsum("hd,chd->hc", q_SHD[s].float(), k_CHD)
        if sink_H is not None:
            score_HC = torch.cat([score_HC, sink_H.to(q_SHD.dtype).float()[:, None]], dim=1)
            v_CHD = torch.cat([v_CHD, torch.zeros_like(out_SHD[:1, :, :])], dim=0)
        out_SHD[s] = torch.einsum("hc,chd->hd", score_HC.softmax(1), v_CHD)
    return out_SHD
