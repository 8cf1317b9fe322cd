"""Finds out at start what the states of a model's recurrent layers are like, and how the layers use them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from transformers.cache_utils import LinearAttentionLayer

from compute_worker.recurrent import RunLayer, cache_at, state_of, with_state
from compute_worker.state_cache import StateShape


class RecurrentProbe:
    """Stands in for RecurrentLayers: runs each layer on one token, and notes what its state is like.

    Attributes:
        shapes: by layer.
        unread: layers that do not read their state even for a single token.
        unknown: names of other things that layers are given.
    """

    def __init__(self) -> None:
        self.shapes: dict[int, StateShape] = {}
        self.unread: set[int] = set()
        self.unknown: set[str] = set()

    def others(self, given: Mapping[str, object]) -> None:
        """See attach_recurrent."""
        self.unknown |= {name for name, value in given.items() if value is not None}

    def forward(self, layer: int, run: RunLayer, x_11D: torch.Tensor) -> torch.Tensor:
        """See RecurrentForward."""
        shape, y_11D = state_of(layer, run, x_11D)
        if not _reads_state(layer, run, x_11D, shape):
            self.unread.add(layer)
        in_chunks = _reads_state(layer, run, torch.cat([x_11D, x_11D], dim=1), shape)
        self.shapes[layer] = dataclasses.replace(shape, in_chunks=in_chunks)
        return y_11D


def _reads_state(layer: int, run: RunLayer, x_1nD: torch.Tensor, shape: StateShape) -> bool:
    """Whether each part of a state that is no number shows in the output of the tokens that follow on it."""
    parts = [part for part in ("conv", "recurrent") if getattr(shape, part) is not None]
    for poisoned in parts:
        states = LinearAttentionLayer()
        value = {part: float("nan") if part == poisoned else 0.0 for part in parts}
        if shape.conv is not None:
            states.conv_states[0] = torch.full(
                (1, *shape.conv), value["conv"], dtype=shape.conv_dtype, device=x_1nD.device
            )
        if shape.recurrent is not None:
            states.recurrent_states[0] = torch.full(
                (1, *shape.recurrent), value["recurrent"], dtype=shape.recurrent_dtype, device=x_1nD.device
            )
        if bool(torch.isfinite(run(x_1nD, cache_at(layer, with_state(states, fresh=False)))).all()):
            return False
    return bool(parts)
