"""How many rows each local expert has computed, by adapter: counted on the device, read now and then.

Legend: L MoE layers, A adapter slots, W one more than the most local slots of a layer, N arrived tokens, K experts a
token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from compute_worker.dispatch.packed_rows import HAS_TRITON

if TYPE_CHECKING:
    from compute_worker.adapter_buffers import AdapterTensors

_REFRESH_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCounter:
    """Counts the rows of one layer.

    Attributes:
        counts: int64 [(A + 2) * W]: for the base model, each adapter slot, and adapters that are gone, W numbers: pairs
            whose expert lives elsewhere, then rows of each local slot.
        width: W.
        uses_kernels: counting is one launch of a Triton kernel.
    """

    counts: torch.Tensor
    width: int
    uses_kernels: bool

    def add(self, slot_NK: torch.Tensor, adapter_slot_N: torch.Tensor) -> None:
        """Counts the rows of tokens.

        Args:
            slot_NK: int64; local slots, -1 for none.
            adapter_slot_N: int32; -1 for the base model.
        """
        if self.uses_kernels:
            from compute_worker.kernels.expert_ids import count_rows

            count_rows(slot_NK.contiguous(), adapter_slot_N.contiguous(), self.counts, width=self.width)
            return
        first_N1 = ((adapter_slot_N.long() + 1) * self.width + 1).unsqueeze(1)
        index_R = (slot_NK + first_N1).flatten()
        self.counts.scatter_add_(0, index_R, torch.ones_like(index_R))


class ExpertLoad:
    """Counters of all layers in one tensor, so that reading them is one copy.

    Args:
        num_slots: local slots of each MoE layer.
        num_adapter_slots: A.
        device: where rows are counted.

    Attributes:
        num_adapter_slots: A.
    """

    def __init__(self, num_slots: Mapping[int, int], num_adapter_slots: int, device: torch.device) -> None:
        self.num_adapter_slots = num_adapter_slots
        self._num_slots = dict(num_slots)
        self._width = max(num_slots.values(), default=0) + 1
        shape = (len(num_slots), num_adapter_slots + 2, self._width)
        self._counts = torch.zeros(shape, dtype=torch.int64, device=device)
        self._uses_kernels = device.type == "cuda" and HAS_TRITON
        self._read: npt.NDArray[np.int64] = np.zeros(shape, dtype=np.int64)
        self._is_stale = False
        self._read_at = 0.0

    def counter(self, layer: int) -> RowCounter:
        """Counts the rows of one layer."""
        index = list(self._num_slots).index(layer)
        return RowCounter(counts=self._counts[index].view(-1), width=self._width, uses_kernels=self._uses_kernels)

    def forget_adapter(self, adapter_slot: int) -> None:
        """The rows of a slot's adapter become those of an adapter that is gone. Step thread only."""
        self._counts[:, -1] += self._counts[:, adapter_slot + 1]
        self._counts[:, adapter_slot + 1] = 0
        read = self._read.copy()
        read[:, -1] += read[:, adapter_slot + 1]
        read[:, adapter_slot + 1] = 0
        self._read = read

    def refresh(self, *, worked: bool) -> None:
        """Reads the counters, at most once a second; called after each turn, when the device has nothing to do.

        Args:
            worked: rows may have been computed since the last call.
        """
        self._is_stale |= worked
        now = time.monotonic()
        if self._is_stale and now - self._read_at >= _REFRESH_SECONDS:
            self._read = self._counts.cpu().numpy().copy()
            self._is_stale, self._read_at = False, now

    @property
    def rows(self) -> Mapping[int, tuple[int, ...]]:
        """Rows by local slot, by layer, about a second old at most. Any thread."""
        return self._by_layer(self._read.sum(axis=1))

    def rows_of(self, adapter_slot: int) -> Mapping[int, tuple[int, ...]]:
        """Like rows, those of one slot's adapter; -1 for the base model."""
        return self._by_layer(self._read[:, adapter_slot + 1])

    def _by_layer(self, counts_LW: npt.NDArray[np.int64]) -> dict[int, tuple[int, ...]]:
        return {
            layer: tuple(counts[1 : 1 + num_slots].tolist())
            for (layer, num_slots), counts in zip(self._num_slots.items(), counts_LW, strict=True)
        }


class LoadOfAdapters:
    """Tells the counters of adapters that leave. A listener of AdapterPool.

    Args:
        load: the counters of the placement that runs.
    """

    def __init__(self, load: Callable[[], ExpertLoad]) -> None:
        self._load = load

    def set_adapter(self, adapter_slot: int, adapter: AdapterTensors) -> None:
        """See AdapterListener: nothing of the slot was counted yet."""

    def clear_adapter(self, adapter_slot: int) -> None:
        """See AdapterListener."""
        self._load().forget_adapter(adapter_slot)
