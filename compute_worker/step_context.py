"""What the layers need to know of the step under way: whose tokens these are, and which adapters are active.

Legend: T tokens of this rank, N tokens that arrived at an MoE layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from compute_worker.adapter_buffers import AdapterTensors
from compute_worker.dense_lora import DenseTokens


class StepContext:
    """One step of this rank.

    Args:
        adapter_slots: per token of this rank, -1 for the base model.
        num_tokens_per_rank: of all ranks.
        active: adapters by slot.
        device: where index tensors go.
        pad_to: rows that every rank sends in a dispatch that pads; 0: as many as the fullest rank has.
        fixed: adapter slots int32 [M], and int64 [1] how many of the M rows are tokens, in buffers that stay where
            they are; M is this rank's entry of num_tokens_per_rank then. None: all rows are tokens.
    """

    def __init__(
        self,
        *,
        adapter_slots: Sequence[int],
        num_tokens_per_rank: Sequence[int],
        active: Mapping[int, AdapterTensors],
        device: torch.device,
        pad_to: int = 0,
        fixed: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self.num_tokens_per_rank = list(num_tokens_per_rank)
        self.active = active
        self.pad_to = pad_to
        if fixed is None:
            self.adapter_slot_T = torch.tensor(adapter_slots, dtype=torch.int32, device=device)
            self.num_rows: torch.Tensor | None = None
            """int64 [1]; rows that are tokens, if others are padding."""
        else:
            self.adapter_slot_T, self.num_rows = fixed
        self.routed_output: torch.Tensor | None = None
        """Output of the last experts layer, for calls that want it alone."""
        self.given_topk: tuple[torch.Tensor, torch.Tensor] | None = None
        """(experts [T, K], weights [T, K]) that replace the router's choice."""
        self._adapter_slots = list(adapter_slots)
        self._device = device
        self._arrived: dict[int, torch.Tensor] | None = None

    def dense_tokens(self, rows: Sequence[int] | None = None) -> list[DenseTokens]:
        """This rank's own tokens of each adapter that has pairs for dense modules.

        Args:
            rows: tokens that a module sees, in its order; None: all. The indices returned are into them.
        """
        slots = self._adapter_slots if rows is None else [self._adapter_slots[row] for row in rows]
        tokens = []
        for slot, index in group_by_slot(slots).items():
            adapter = self.active[slot]
            if not adapter.dense:
                continue
            is_all = len(index) == len(slots)
            token_index = None if is_all else torch.tensor(index, dtype=torch.int64, device=self._device)
            tokens.append(DenseTokens(token_index=token_index, pairs=adapter.dense))
        return tokens

    def arrived_tokens(self, adapter_slot_N: torch.Tensor, *, same_every_layer: bool) -> dict[int, torch.Tensor]:
        """Tokens of each adapter among those that arrived: slot -> int64 indices.

        Waits for the device, at the first layer only if the same tokens arrive at every layer.
        """
        if self._arrived is not None and same_every_layer:
            return self._arrived
        groups = group_by_slot(adapter_slot_N.tolist())
        self._arrived = {
            slot: torch.tensor(index, dtype=torch.int64, device=self._device) for slot, index in groups.items()
        }
        return self._arrived


def group_by_slot(adapter_slots: Sequence[int]) -> dict[int, list[int]]:
    """Positions of each slot >= 0, by slot. Example: [2, -1, 0, 2] -> {0: [2], 2: [0, 3]}."""
    groups: dict[int, list[int]] = {}
    for position, slot in enumerate(adapter_slots):
        if slot >= 0:
            groups.setdefault(slot, []).append(position)
    return dict(sorted(groups.items()))


class CurrentStep:
    """The step under way, shared by all layers of a model; None between steps."""

    def __init__(self) -> None:
        self.context: StepContext | None = None
