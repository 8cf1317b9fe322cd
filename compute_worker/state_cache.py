"""Room for what recurrent layers keep of each running sequence: a state of one size, however long the sequence is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from compute_worker.kv_cache import zeros


@dataclass(frozen=True, kw_only=True, slots=True)
class StateShape:
    """The state of one sequence in one layer.

    Attributes:
        conv: shape of the convolution's state; None without.
        conv_dtype: its element type.
        recurrent: shape of the recurrent state; None without.
        recurrent_dtype: its element type.
        in_chunks: several tokens may follow on a state at once; else the layer reads it only for one token at a time.
    """

    conv: tuple[int, ...] | None
    conv_dtype: torch.dtype
    recurrent: tuple[int, ...] | None
    recurrent_dtype: torch.dtype
    in_chunks: bool = True

    @property
    def recurrent_bytes(self) -> int:
        """Of the recurrent state."""
        return 0 if self.recurrent is None else torch.Size(self.recurrent).numel() * self.recurrent_dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Of both states."""
        conv = 0 if self.conv is None else torch.Size(self.conv).numel() * self.conv_dtype.itemsize
        return conv + self.recurrent_bytes


class StateCache:
    """The states of all running sequences.

    Attributes:
        shapes: by layer.
        num_places: sequences that have room.
        spare_place: one more, for rows of a step that are no sequence's; nobody reads it.
        conv: layer -> [num_places + 1, *conv shape], where there is one.
        recurrent: layer -> [num_places + 1, *recurrent shape], where there is one.
    """

    def __init__(self, *, shapes: Mapping[int, StateShape], num_places: int, device: torch.device) -> None:
        self.shapes = dict(shapes)
        self.num_places = num_places
        self.spare_place = num_places
        self.conv = {
            layer: zeros((num_places + 1, *shape.conv), dtype=shape.conv_dtype, device=device)
            for layer, shape in shapes.items()
            if shape.conv is not None
        }
        self.recurrent = {
            layer: zeros((num_places + 1, *shape.recurrent), dtype=shape.recurrent_dtype, device=device)
            for layer, shape in shapes.items()
            if shape.recurrent is not None
        }

    def num_bytes(self) -> int:
        """Of all storages."""
        return sum(tensor.untyped_storage().nbytes() for tensor in (*self.conv.values(), *self.recurrent.values()))

    @staticmethod
    def place_bytes(shapes: Mapping[int, StateShape]) -> int:
        """Bytes of one sequence's states in all layers."""
        return sum(shape.num_bytes for shape in shapes.values())
