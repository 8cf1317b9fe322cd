"""Layers that keep a state of fixed size for each sequence: linear attention, state-space models, convolutions.

transformers' own code of such a layer runs once for all sequences that decode, and once for each chunk of a prompt:
every time with a cache that holds the states of just these sequences. The states of all running sequences lie in one
tensor a layer, by the sequence's place on this rank. A sequence that begins reads no state, so what the one before it
left there does not matter.

Legend: T tokens of the step, S sequences, D model width. A convolution's state holds its last inputs; the recurrent
state is what the layer has made of all tokens so far.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionLayer

from compute_worker.dense_lora import DenseLora, DenseTokens
from compute_worker.paged_attention import SequenceSpan
from compute_worker.state_cache import StateCache, StateShape

RunLayer = Callable[[torch.Tensor, Cache], torch.Tensor]
"""A layer's own code: [S, n, D] from the next n tokens of S sequences and a cache of their states, which it updates."""

RecurrentForward = Callable[[int, RunLayer, torch.Tensor], torch.Tensor]
"""[1, T, D] from the number of a layer, its own code, and its input [1, T, D] of the step's tokens."""

_CACHE_ARGUMENTS = ("cache_params", "past_key_values")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodePart:
    """One token of each of several sequences.

    Attributes:
        rows: where they are among the step's tokens: int64 [S], or a slice of S.
        places_S: int64, the sequences' places.
        begins_S: bool, sequences of which this is the first token: they have no state yet; None: all have one.
        adapters: tokens of each adapter, as indices into the S.
    """

    rows: torch.Tensor | slice
    places_S: torch.Tensor
    begins_S: torch.Tensor | None
    adapters: Sequence[DenseTokens]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPart:
    """The next tokens of one sequence.

    Attributes:
        rows: where they are among the step's tokens.
        place: the sequence's place.
        fresh: the sequence begins here.
        adapters: the sequence's adapter, if it has one.
    """

    rows: slice
    place: int
    fresh: bool
    adapters: Sequence[DenseTokens]


RecurrentPart = DecodePart | ChunkPart
"""Tokens of a step that a recurrent layer computes in one go."""


def prepare_parts(
    sequences: Sequence[SequenceSpan],
    dense_tokens: Callable[[Sequence[int]], Sequence[DenseTokens]],
    device: torch.device,
) -> tuple[RecurrentPart, ...]:
    """The parts of a step, the same for all layers. Together they hold every token once.

    Args:
        sequences: as in StepBatch.
        dense_tokens: tokens of each adapter among the given rows, see StepContext.dense_tokens.
        device: where index tensors go.
    """
    decodes = [span for span in sequences if _decodes(span)]
    parts: list[RecurrentPart] = []
    if decodes:
        rows = [span.query_start for span in decodes]
        in_a_row = rows == list(range(rows[0], rows[0] + len(rows)))
        parts.append(
            DecodePart(
                rows=slice(rows[0], rows[0] + len(rows)) if in_a_row else torch.tensor(rows, device=device),
                places_S=torch.tensor([span.place for span in decodes], device=device),
                begins_S=None,
                adapters=dense_tokens(rows),
            )
        )
    for span in sequences:
        if not _decodes(span):
            stop = span.query_start + span.query_len
            parts.append(
                ChunkPart(
                    rows=slice(span.query_start, stop),
                    place=span.place,
                    fresh=span.query_len == span.kv_len,
                    adapters=dense_tokens(range(span.query_start, stop)),
                )
            )
    return tuple(parts)


def fixed_parts(
    places_M: torch.Tensor, kv_len_M: torch.Tensor, adapters: Sequence[DenseTokens]
) -> tuple[RecurrentPart, ...]:
    """The one part of a decode step of M rows, in buffers that stay where they are; no value is read on the host.

    Args:
        places_M: int64; the spare place for rows of nobody.
        kv_len_M: int; positions of each row's sequence with the new one, 0 for rows of nobody.
        adapters: as in DecodePart.
    """
    rows = slice(0, places_M.shape[0])
    return (DecodePart(rows=rows, places_S=places_M, begins_S=kv_len_M <= 1, adapters=adapters),)


def _decodes(span: SequenceSpan) -> bool:
    return span.query_len == 1 and span.kv_len > 1


class RecurrentLayers:
    """What the recurrent layers of one model call. The step sets `parts` before it runs the model."""

    def __init__(self, cache: StateCache, lora: DenseLora) -> None:
        self.cache = cache
        self.parts: tuple[RecurrentPart, ...] = ()
        self._lora = lora

    def forward(self, layer: int, run: RunLayer, x_1TD: torch.Tensor) -> torch.Tensor:
        """See RecurrentForward."""
        assert self.parts, "a recurrent layer outside a step"
        y_1TD = torch.empty_like(x_1TD)
        all_tokens = self._lora.adapters
        try:
            for part in self.parts:
                # The layer's linear maps see the part's tokens only.
                self._lora.adapters = part.adapters
                if isinstance(part, DecodePart):
                    y_1TD[0, part.rows] = self._decode(layer, run, x_1TD[0, part.rows], part)
                else:
                    y_1TD[:, part.rows] = self._chunk(layer, run, x_1TD[:, part.rows], part)
        finally:
            self._lora.adapters = all_tokens
        return y_1TD

    def _decode(self, layer: int, run: RunLayer, x_SD: torch.Tensor, part: DecodePart) -> torch.Tensor:
        """[S, D]: the states are gathered, and put back."""
        states = LinearAttentionLayer()
        stores = self._stores(layer, states)
        for store, kept in stores:
            state_S = store[part.places_S]
            if part.begins_S is not None:
                begins = part.begins_S.view(-1, *[1] * (state_S.dim() - 1))
                state_S = torch.where(begins, torch.zeros_like(state_S), state_S)
            kept[0] = state_S
        y_S1D = run(x_SD.unsqueeze(1), cache_at(layer, with_state(states, fresh=False)))
        for store, kept in stores:
            changed = kept[0]
            assert changed is not None
            store[part.places_S] = changed
        return y_S1D[:, 0]

    def _chunk(self, layer: int, run: RunLayer, x_1nD: torch.Tensor, part: ChunkPart) -> torch.Tensor:
        """[1, n, D]: the sequence's state is updated in place."""
        if part.fresh or self.cache.shapes[layer].in_chunks:
            return run(x_1nD, cache_at(layer, self._states(layer, part)))
        tokens = torch.split(x_1nD, 1, dim=1)
        return torch.cat([run(token, cache_at(layer, self._states(layer, part))) for token in tokens], dim=1)

    def _states(self, layer: int, part: ChunkPart) -> LinearAttentionLayer:
        """Views of the sequence's state."""
        states = LinearAttentionLayer()
        for store, kept in self._stores(layer, states):
            kept[0] = store[part.place : part.place + 1]
        return with_state(states, fresh=part.fresh)

    def _stores(
        self, layer: int, states: LinearAttentionLayer
    ) -> list[tuple[torch.Tensor, dict[int, torch.Tensor | None]]]:
        """(all sequences' states, where a cache layer keeps its own) of a layer."""
        found = (
            (self.cache.conv.get(layer), states.conv_states),
            (self.cache.recurrent.get(layer), states.recurrent_states),
        )
        return [(store, kept) for store, kept in found if store is not None]


def with_state(states: LinearAttentionLayer, *, fresh: bool) -> LinearAttentionLayer:
    """Marks a cache layer's tensors as its memory; `fresh`: they hold no state yet, and are overwritten."""
    conv, recurrent = states.conv_states[0], states.recurrent_states[0]
    if conv is not None:
        states.conv_kernel_size[0] = conv.shape[-1]
        states.is_conv_states_initialized[0] = True
        states.dtype, states.device = conv.dtype, conv.device
    states.is_recurrent_states_initialized[0] = recurrent is not None
    states.has_previous_state[0] = not fresh
    return states


def cache_at(layer: int, states: LinearAttentionLayer) -> Cache:
    """A cache whose entry of the layer is `states`."""
    return Cache(layers=[states] * (layer + 1))


def state_of(layer: int, run: RunLayer, x_11D: torch.Tensor) -> tuple[StateShape, torch.Tensor]:
    """What a layer's own code keeps of one token, and its output [1, 1, D]. Any device, also meta."""
    states = LinearAttentionLayer()
    y_11D = run(x_11D, cache_at(layer, states))
    conv, recurrent = states.conv_states[0], states.recurrent_states[0]
    shape = StateShape(
        conv=None if conv is None else tuple(conv.shape[1:]),
        conv_dtype=x_11D.dtype if conv is None else conv.dtype,
        recurrent=None if recurrent is None else tuple(recurrent.shape[1:]),
        recurrent_dtype=torch.float32 if recurrent is None else recurrent.dtype,
    )
    return shape, y_11D


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentModule:
    """A recurrent layer of a model.

    Attributes:
        path: of the module.
        layer: its number.
        module: the module.
        run: its own code.
    """

    path: str
    layer: int
    module: nn.Module
    run: RunLayer


def recurrent_modules(model: nn.Module) -> Iterator[RecurrentModule]:
    """All recurrent layers."""
    for path, module in model.named_modules():
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            continue
        argument = _cache_argument(module)
        # Attention modules take the cache, too.
        if argument == "cache_params" or (argument and any(isinstance(m, nn.Conv1d) for m in module.children())):
            yield RecurrentModule(path=path, layer=layer, module=module, run=partial(_run, module, argument))


def _cache_argument(module: nn.Module) -> str:
    """Name of the argument that takes the cache; empty if none does."""
    arguments = inspect.signature(type(module).forward).parameters
    return next((name for name in _CACHE_ARGUMENTS if name in arguments), "")


def _run(module: nn.Module, argument: str, x: torch.Tensor, cache: Cache) -> torch.Tensor:
    result: torch.Tensor = type(module).forward(module, hidden_states=x, **{argument: cache})
    return result


def attach_recurrent(
    model: PreTrainedModel, forward: RecurrentForward, *, others: Callable[[Mapping[str, object]], None] | None = None
) -> None:
    """Makes each recurrent layer of the model call `forward` instead of its own code.

    Args:
        forward: see RecurrentForward.
        others: told of what else a layer is given.
    """
    for found in recurrent_modules(model):
        found.module.forward = partial(_forward, forward, found.layer, found.run, others)


def _forward(
    forward: RecurrentForward,
    layer: int,
    run: RunLayer,
    others: Callable[[Mapping[str, object]], None] | None,
    hidden_states: torch.Tensor,
    **given: object,
) -> torch.Tensor:
    assert all(given.pop(name, None) is None for name in _CACHE_ARGUMENTS), "a cache of the model's own"
    if others is not None:
        others(given)
    return forward(layer, run, hidden_states)
