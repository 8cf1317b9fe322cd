"""Attention of packed tokens over a paged key/value cache, behind transformers' attention interface.

Positions of all sequences share one cache per layer, in blocks. Tokens of a step come packed as [1, T]: sequences that
decode (one new token) are computed together, padded to the longest; each prefill chunk by itself.

Legend: T tokens of the step, S sequences, C positions of the padded context, Hq / Hkv query and key/value heads,
Dh head width (Dk of keys, Dv of values, where they differ). A cache slot is block * block_size + offset; after the
blocks come two more slots: one is always zero and stands for padding, the other is spare, for what nobody reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from compute_worker.kv_cache import KVCache

_CONTEXT_MULTIPLE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceSpan:
    """A sequence's part of a step.

    Attributes:
        query_start: its first row in the packed tokens.
        query_len: its new tokens, at least 1.
        kv_len: its positions after this step, new tokens included.
        block_table: its cache blocks, in order; they hold kv_len positions at least.
        place: its own among the running sequences of this rank, from 0; the states of recurrent layers are kept there.
    """

    query_start: int
    query_len: int
    kv_len: int
    block_table: tuple[int, ...]
    place: int


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
class Visible:
    """Which positions before it a token sees.

    Attributes:
        window: itself and window - 1 positions before it; 0: no limit.
        chunk: those of its own chunk of this many positions; 0: no limit.
    """

    window: int = 0
    chunk: int = 0

    def covers(self, kv_len: int) -> bool:
        """True if the limits hide nothing in a context of this length."""
        return all(limit == 0 or kv_len <= limit for limit in (self.window, self.chunk))

    def mask(self, query: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """bool, true where the position `context` is within the limits for a token at `query`; they broadcast."""
        mask = context <= query
        if self.window:
            mask = mask & (context > query - self.window)
        if self.chunk:
            mask = mask & (context >= query // self.chunk * self.chunk)
        return mask


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionStep:
    """Index tensors of one step, the same for all layers. `masks` fills up as layers ask."""

    write_slot_T: torch.Tensor
    decode: _Decode | None
    prefills: tuple[_Prefill, ...]
    masks: dict[tuple[int, Visible], torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedDecode:
    """Index tensors of a decode step of M rows, one new token each, in buffers that stay where they are.

    Attributes:
        write_slot_M: int64; where the new keys and values go; the spare slot for padding rows.
        kv_len_M: int32; positions, the new one included; 0 for padding rows, whose output is zero.
        block_table_MB: int32; each row's blocks.
    """

    write_slot_M: torch.Tensor
    kv_len_M: torch.Tensor
    block_table_MB: torch.Tensor


def prepare_step(cache: KVCache, sequences: Sequence[SequenceSpan], num_tokens: int) -> AttentionStep:
    """Index tensors on the cache's device. The spans' rows must cover the tokens exactly, in order."""
    device, size = cache.device, cache.block_size
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
    device = cache.device
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
        k: [1, Hkv, T, Dk], new tokens only.
        v: [1, Hkv, T, Dv].
        scaling: factor of the scores.
        visible: limits of what a token sees.
        sink_H: [Hq], score of a position of no value that every token sees, too; None without.
    """

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scaling: float
    visible: Visible
    sink_H: torch.Tensor | None = None


AttentionForward = Callable[[LayerInput, Mapping[str, object]], torch.Tensor]
"""[1, T, Hq, Dv] from what a layer attends with, and what else its module passes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerAttention:
    """What an attention module of the model calls.

    Attributes:
        layer: number in the cache.
        visible: limits that the config has for the layer; the module may give a window of its own.
        forward: computes [1, T, Hq, Dv]; also gets what else the module passes.
    """

    layer: int
    visible: Visible
    forward: AttentionForward


class PagedAttention:
    """The attention function of one model. The step sets `step` before it runs the model."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.step: AttentionStep | FixedDecode | None = None

    def forward(self, given: LayerInput, _others: Mapping[str, object]) -> torch.Tensor:
        """Writes the new keys and values, then attends. Returns [1, T, Hq, Dv]."""
        step = self.step
        assert step is not None, "attention outside a step"
        if isinstance(step, FixedDecode):
            return self._fixed_decode(step, given)
        for cache, new in ((self.cache.k, given.k), (self.cache.v, given.v)):
            cache[given.layer].index_copy_(0, step.write_slot_T, new[0].transpose(0, 1).contiguous())
        _, num_heads, num_tokens, _ = given.q.shape
        out_THD = given.q.new_empty((num_tokens, num_heads, given.v.shape[3]))
        if step.decode is not None:
            out_THD.index_copy_(0, step.decode.rows, self._decode(step, step.decode, given))
        for number, prefill in enumerate(step.prefills):
            out_THD[prefill.rows] = self._prefill(step, number, given)
        return out_THD.unsqueeze(0)

    def _fixed_decode(self, step: FixedDecode, given: LayerInput) -> torch.Tensor:
        from compute_worker.kernels.cache_write import write_kv
        from compute_worker.kernels.decode_attention import decode_attention

        k_cache, v_cache = self.cache.k[given.layer], self.cache.v[given.layer]
        write_kv(given.k[0], given.v[0], k_cache, v_cache, step.write_slot_M)
        out_MHD: torch.Tensor = decode_attention(
            given.q[0].transpose(0, 1),
            k_cache,
            v_cache,
            step.block_table_MB,
            step.kv_len_M,
            block_size=self.cache.block_size,
            scaling=given.scaling,
            window=given.visible.window,
            chunk=given.visible.chunk,
            sink_H=given.sink_H,
        )
        return out_MHD.unsqueeze(0)

    def _decode(self, step: AttentionStep, decode: _Decode, given: LayerInput) -> torch.Tensor:
        """[S, Hq, Dv]. Query heads of one key/value head take the place of query positions: all have the same mask."""
        num_sequences, num_kv_heads = decode.rows.shape[0], given.k.shape[1]
        q_SHD = given.q[0].transpose(0, 1)[decode.rows]
        q_SHGD = q_SHD.reshape(num_sequences, num_kv_heads, -1, q_SHD.shape[-1])
        sink_HG = None if given.sink_H is None else given.sink_H.view(num_kv_heads, -1)
        out_SHGD = _attend(
            q_SHGD,
            self.cache.k[given.layer][decode.slots].transpose(1, 2),
            self.cache.v[given.layer][decode.slots].transpose(1, 2),
            mask=self._decode_mask(step, decode, given.visible).expand(-1, -1, q_SHGD.shape[2], -1),
            scaling=given.scaling,
            sink=sink_HG,
        )
        return out_SHGD.reshape(num_sequences, given.q.shape[1], -1)

    @staticmethod
    def _decode_mask(step: AttentionStep, decode: _Decode, visible: Visible) -> torch.Tensor:
        """bool [S, 1, 1, C]."""
        key = (-1, visible)
        mask = step.masks.get(key)
        if mask is None:
            position_C = torch.arange(decode.valid.shape[1], device=decode.valid.device)
            mask = decode.valid & visible.mask(decode.kv_len.unsqueeze(1) - 1, position_C)
            mask = mask[:, None, None, :]
            step.masks[key] = mask
        return mask

    def _prefill(self, step: AttentionStep, number: int, given: LayerInput) -> torch.Tensor:
        """[query_len, Hq, Dv] of one prefill; a prompt that begins here needs neither the cache nor a mask."""
        prefill = step.prefills[number]
        q = given.q[:, :, prefill.rows]
        fresh = prefill.kv_len == prefill.query_len
        if fresh:
            k_1HCD, v_1HCD = given.k[:, :, prefill.rows], given.v[:, :, prefill.rows]
        else:
            k_1HCD, v_1HCD = (
                cache[given.layer][prefill.slots].transpose(0, 1).unsqueeze(0) for cache in (self.cache.k, self.cache.v)
            )
        groups = q.shape[1] // k_1HCD.shape[1]
        if groups > 1:
            k_1HCD, v_1HCD = (t.repeat_interleave(groups, dim=1) for t in (k_1HCD, v_1HCD))
        sink_H1 = None if given.sink_H is None else given.sink_H.unsqueeze(1)
        plain = fresh and sink_H1 is None and given.visible.covers(prefill.kv_len)
        mask = None if plain else self._prefill_mask(step, number, given.visible)
        out = _attend(q, k_1HCD, v_1HCD, mask=mask, scaling=given.scaling, sink=sink_H1)
        return out[0].transpose(0, 1)

    @staticmethod
    def _prefill_mask(step: AttentionStep, number: int, visible: Visible) -> torch.Tensor:
        """bool [query_len, kv_len]: causal, within the limits."""
        key = (number, visible)
        mask = step.masks.get(key)
        if mask is None:
            prefill = step.prefills[number]
            device = prefill.slots.device
            query = torch.arange(prefill.kv_len - prefill.query_len, prefill.kv_len, device=device).unsqueeze(1)
            mask = visible.mask(query, torch.arange(prefill.kv_len, device=device).unsqueeze(0))
            step.masks[key] = mask
        return mask


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    scaling: float,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(scaling * q k + mask) v, with a sink as one more position.

    Args:
        q: [B, H, Q, Dk].
        k: [B, H, C, Dk].
        v: [B, H, C, Dv].
        mask: bool, broadcasts to [B, H, Q, C]; None: causal.
        sink: scores that broadcast to [H, Q]: the position has this score, and a value of zero.
    """
    if sink is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling)
    assert mask is not None
    (batch, heads, queries, _), context = q.shape, k.shape[2]
    bias = q.new_zeros((batch, heads, queries, context + 1))
    bias[..., :context].masked_fill_(~mask, -math.inf)
    bias[..., context] = sink.to(q.dtype)
    # A key of zeros has score 0, to which the bias adds the sink's.
    k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scaling)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    dropout: float = 0.0,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface; `module.epilora_attention` is the module's LayerAttention."""
    assert attention_mask is None
    assert dropout == 0.0
    attention = module.epilora_attention
    assert isinstance(attention, LayerAttention)
    given = LayerInput(
        layer=attention.layer,
        q=query,
        k=key,
        v=value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        visible=Visible(window=sliding_window or attention.visible.window, chunk=attention.visible.chunk),
        sink_H=s_aux,
    )
    return attention.forward(given, others), None
