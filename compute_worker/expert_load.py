"""How many rows each local expert has computed: counted on the device, read now and then by the step thread."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

_REFRESH_SECONDS = 1.0


class ExpertLoad:
    """Counters of all layers in one tensor, so that reading them is one copy.

    Args:
        num_slots: local slots of each MoE layer.
        device: where rows are counted.
    """

    def __init__(self, num_slots: Mapping[int, int], device: torch.device) -> None:
        # One entry more a layer, its first, takes the pairs whose expert lives elsewhere.
        sizes = [count + 1 for count in num_slots.values()]
        self._counters = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._by_layer = dict(zip(num_slots, torch.split(self._counters, sizes), strict=True))
        self._rows: dict[int, tuple[int, ...]] = {layer: (0,) * count for layer, count in num_slots.items()}
        self._is_stale = False
        self._read_at = 0.0

    def counter(self, layer: int) -> torch.Tensor:
        """int64 [1 + local slots] of one layer: rows by local slot + 1. To add to."""
        return self._by_layer[layer]

    def refresh(self, *, worked: bool) -> None:
        """Reads the counters, at most once a second; called after each turn, when the device has nothing to do.

        Args:
            worked: rows may have been computed since the last call.
        """
        self._is_stale |= worked
        now = time.monotonic()
        if self._is_stale and now - self._read_at >= _REFRESH_SECONDS:
            self._rows = {layer: tuple(counter.tolist()[1:]) for layer, counter in self._on_host().items()}
            self._is_stale, self._read_at = False, now

    @property
    def rows(self) -> Mapping[int, tuple[int, ...]]:
        """Rows by local slot, by layer, about a second old at most. Any thread."""
        return self._rows

    def _on_host(self) -> dict[int, torch.Tensor]:
        sizes = [counter.shape[0] for counter in self._by_layer.values()]
        return dict(zip(self._by_layer, torch.split(self._counters.cpu(), sizes), strict=True))
