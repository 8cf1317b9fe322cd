"""Attention of packed tokens over a paged key/value cache, behind transformers' attention interface.

Positions of all sequences share one cache per layer, in blocks. Tokens of a step come packed as [1, T]: sequences that
decode (one new token) are computed together, padded to the longest; each prefill chunk by itself.

Legend: T tokens of the step, S sequences, C positions of the padded context, Hq / Hkv query and key/value heads,
Dh head width. A cache slot is block * block_size + offset; the last slot is always zero and stands for padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

_CONTEXT_MULTIPLE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceSpan:
    """A sequence's part of a step.

    Attributes:
        query_start: its first row in the packed tokens.
        query_len: its new tokens, at least 1.
        kv_len: its positions after this step, new tokens included.
        block_table: its cache blocks, in order; they hold kv_len positions at least.
    """

    query_start: int
    query_len: int
    kv_len: int
    block_table: tuple[int, ...]


class KVCache:
    """Keys and values of all layers.

    Attributes:
        kv: [num_layers, 2, num_blocks * block_size + 1, Hkv, Dh].
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.padding_slot = num_blocks * block_size
        self.kv = torch.zeros((num_layers, 2, self.padding_slot + 1, num_heads, head_dim), dtype=dtype, device=device)

    @staticmethod
    def block_bytes(*, num_layers: int, block_size: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one block in all layers."""
        return num_layers * 2 * block_size * num_heads * head_dim * dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class _Decode:
    """Sequences with one new token: rows int64 [S], slots int64 [S, C], kv_len int64 [S], valid bool [S, C]."""

    rows: torch.Tensor
    slots: torch.Tensor
    kv_len: torch.Tensor
    valid: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prefill:
    """A sequence with more new tokens: its rows, and int64 [kv_len] slots of its context."""

    rows: slice
    query_len: int
    kv_len: int
    slots: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionStep:
    """Index tensors of one step, the same for all layers. `masks` fills up as layers ask."""

    write_slot_T: torch.Tensor
    decode: _Decode | None
    prefills: tuple[_Prefill, ...]
    masks: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict)


def prepare_step(cache: KVCache, sequences: Sequence[SequenceSpan], num_tokens: int) -> AttentionStep:
    """Index tensors on the cache's device. The spans' rows must cover the tokens exactly, in order."""
    device, size = cache.kv.device, cache.block_size
    write_slots: list[int] = []
    prefills = []
    for span in sequences:
        assert span.query_start == len(write_slots), span
        assert 1 <= span.query_len <= span.kv_len, span
        assert span.kv_len <= len(span.block_table) * size, span
        start = span.kv_len - span.query_len
        write_slots += [span.block_table[p // size] * size + p % size for p in range(start, span.kv_len)]
        if span.query_len > 1:
            blocks = torch.tensor(span.block_table, device=device)
            prefills.append(
                _Prefill(
                    rows=slice(span.query_start, span.query_start + span.query_len),
                    query_len=span.query_len,
                    kv_len=span.kv_len,
                    slots=_slots_of(blocks.unsqueeze(0), size)[0, : span.kv_len],
                )
            )
    assert len(write_slots) == num_tokens, (len(write_slots), num_tokens)
    return AttentionStep(
        write_slot_T=torch.tensor(write_slots, dtype=torch.int64, device=device),
        decode=_prepare_decode(cache, [span for span in sequences if span.query_len == 1]),
        prefills=tuple(prefills),
    )


def _prepare_decode(cache: KVCache, spans: Sequence[SequenceSpan]) -> _Decode | None:
    if not spans:
        return None
    device = cache.kv.device
    width = max(len(span.block_table) for span in spans)
    table = [[*span.block_table, *[0] * (width - len(span.block_table))] for span in spans]
    kv_len_S = torch.tensor([span.kv_len for span in spans], device=device)
    longest = max(span.kv_len for span in spans)
    context = -(-longest // _CONTEXT_MULTIPLE) * _CONTEXT_MULTIPLE
    slots_SC = _slots_of(torch.tensor(table, device=device), cache.block_size)[:, :context]
    slots_SC = F.pad(slots_SC, (0, context - slots_SC.shape[1]), value=cache.padding_slot)
    valid_SC = torch.arange(context, device=device) < kv_len_S.unsqueeze(1)
    return _Decode(
        rows=torch.tensor([span.query_start for span in spans], device=device),
        # A stale value next to a sequence's end must not reach it, not even times zero: it might be no number.
        slots=torch.where(valid_SC, slots_SC, cache.padding_slot),
        kv_len=kv_len_S,
        valid=valid_SC,
    )


def _slots_of(blocks_SB: torch.Tensor, block_size: int) -> torch.Tensor:
    """Slots of all positions of each row of blocks. Example: blocks [[2, 0]], size 2 -> [[4, 5, 0, 1]]."""
    offsets = torch.arange(block_size, device=blocks_SB.device)
    return (blocks_SB.unsqueeze(2) * block_size + offsets).flatten(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerInput:
    """What one layer attends with.

    Attributes:
        layer: number in the cache.
        q: [1, Hq, T, Dh].
        k: [1, Hkv, T, Dh], new tokens only.
        v: like k.
        scaling: factor of the scores.
        window: a token sees itself and window - 1 positions before it; 0: all before it.
    """

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scaling: float
    window: int


class PagedAttention:
    """The attention function of one model. The step sets `step` before it runs the model."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.step: AttentionStep | None = None

    def forward(self, given: LayerInput) -> torch.Tensor:
        """Writes the new keys and values, then attends. Returns [1, T, Hq, Dh]."""
        step = self.step
        assert step is not None, "attention outside a step"
        kv = self.cache.kv[given.layer]
        for number, new in enumerate((given.k, given.v)):
            kv[number].index_copy_(0, step.write_slot_T, new[0].transpose(0, 1).contiguous())
        _, num_heads, num_tokens, _ = given.q.shape
        out_THD = given.q.new_empty((num_tokens, num_heads, given.v.shape[3]))
        if step.decode is not None:
            out_THD.index_copy_(0, step.decode.rows, self._decode(step, step.decode, given, kv))
        for number, prefill in enumerate(step.prefills):
            out_THD[prefill.rows] = self._prefill(step, number, given, kv)
        return out_THD.unsqueeze(0)

    def _decode(self, step: AttentionStep, decode: _Decode, given: LayerInput, kv: torch.Tensor) -> torch.Tensor:
        """[S, Hq, Dh]. Query heads of one key/value head take the place of query positions: all have the same mask."""
        num_sequences, num_kv_heads = decode.rows.shape[0], given.k.shape[1]
        q_SHD = given.q[0].transpose(0, 1)[decode.rows]
        q_SHGD = q_SHD.reshape(num_sequences, num_kv_heads, -1, q_SHD.shape[-1])
        out_SHGD = F.scaled_dot_product_attention(
            q_SHGD,
            kv[0, decode.slots].transpose(1, 2),
            kv[1, decode.slots].transpose(1, 2),
            attn_mask=self._decode_mask(step, decode, given.window).expand(-1, -1, q_SHGD.shape[2], -1),
            scale=given.scaling,
        )
        return out_SHGD.reshape(num_sequences, given.q.shape[1], -1)

    @staticmethod
    def _decode_mask(step: AttentionStep, decode: _Decode, window: int) -> torch.Tensor:
        """bool [S, 1, 1, C]."""
        key = (-1, window)
        mask = step.masks.get(key)
        if mask is None:
            mask = decode.valid
            if window:
                position_C = torch.arange(mask.shape[1], device=mask.device)
                mask = mask & (position_C >= decode.kv_len.unsqueeze(1) - window)
            mask = mask[:, None, None, :]
            step.masks[key] = mask
        return mask

    def _prefill(self, step: AttentionStep, number: int, given: LayerInput, kv: torch.Tensor) -> torch.Tensor:
        """[query_len, Hq, Dh] of one prefill; a prompt that begins here needs neither the cache nor a mask."""
        prefill = step.prefills[number]
        q = given.q[:, :, prefill.rows]
        fresh = prefill.kv_len == prefill.query_len
        if fresh:
            k_1HCD, v_1HCD = given.k[:, :, prefill.rows], given.v[:, :, prefill.rows]
        else:
            context = kv[:, prefill.slots].transpose(1, 2)
            k_1HCD, v_1HCD = context[:1], context[1:]
        groups = q.shape[1] // k_1HCD.shape[1]
        if groups > 1:
            k_1HCD, v_1HCD = (t.repeat_interleave(groups, dim=1) for t in (k_1HCD, v_1HCD))
        plain = fresh and (given.window == 0 or prefill.kv_len <= given.window)
        mask = None if plain else self._prefill_mask(step, number, given.window)
        out = F.scaled_dot_product_attention(q, k_1HCD, v_1HCD, attn_mask=mask, is_causal=plain, scale=given.scaling)
        return out[0].transpose(0, 1)

    @staticmethod
    def _prefill_mask(step: AttentionStep, number: int, window: int) -> torch.Tensor:
        """bool [query_len, kv_len]: causal, within the window."""
        key = (number, window)
        mask = step.masks.get(key)
        if mask is None:
            prefill = step.prefills[number]
            device = prefill.slots.device
            query = torch.arange(prefill.kv_len - prefill.query_len, prefill.kv_len, device=device).unsqueeze(1)
            context = torch.arange(prefill.kv_len, device=device).unsqueeze(0)
            mask = context <= query
            if window:
                mask &= context > query - window
            step.masks[key] = mask
        return mask


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface; `module.epilora_attention` is the model's PagedAttention."""
    assert attention_mask is None
    assert dropout == 0.0
    attention, layer = module.epilora_attention, module.layer_idx
    assert isinstance(attention, PagedAttention)
    assert isinstance(layer, int)
    given = LayerInput(
        layer=layer,
        q=query,
        k=key,
        v=value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window or 0,
    )
    return attention.forward(given), None
