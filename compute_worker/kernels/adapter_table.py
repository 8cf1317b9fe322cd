"""Where the kernels find each adapter's A and B: device tables of addresses, ranks and scales.

A table belongs to one expert layer. The adapters' own tensors stay where the adapter pool put them, in the slice
layout (blocks of local experts one after another, each with its own lora rank, nothing padded); the table only points
into them. Changing a slot rewrites small device tensors in place, so a captured CUDA graph sees the new adapter at
its next replay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

PROJECTIONS = ("gate", "up", "down")
"""Table columns. A slice's shared `gate_up` pair fills both gate and up with the same A."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectionSlice:
    """One projection of one adapter on this rank's local experts, in slice layout."""

    a: torch.Tensor
    """[sum of ranks, in]: the block of local expert s is [r_s, in]."""
    b: torch.Tensor
    """flat [out * sum of ranks]: the block of local expert s is [out, r_s] row-major."""
    lora_rank: torch.Tensor
    """int32 [e] on the CPU; 0 where the expert has no pair."""
    scale: torch.Tensor
    """float32 [e], on the CPU or on the table's device."""


LayerAdapter = Mapping[str, ProjectionSlice]
"""Keys gate_up | gate | up | down; `gate_up` (one A, B of 2F rows in the model's own order) excludes gate and up."""


class TablePointers(NamedTuple):
    """The device tensors, [num_slots, e, 3] each, as the kernels take them."""

    lora_rank: torch.Tensor
    a_address: torch.Tensor
    b_address: torch.Tensor
    scale: torch.Tensor


def _check_max_rank(max_lora_rank: int) -> None:
    if not 1 <= max_lora_rank <= 512:
        raise ValueError(f"max_lora_rank must be 1..512, got {max_lora_rank}")


def _columns(name: str) -> tuple[int, ...]:
    """Table columns that a projection fills. Example: "gate_up" -> (0, 1), "down" -> (2,)."""
    return tuple(PROJECTIONS.index(column) for column in (("gate", "up") if name == "gate_up" else (name,)))


class AdapterTable:
    """Address table of one expert layer for up to num_slots resident adapters."""

    def __init__(
        self,
        *,
        num_slots: int,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        max_lora_rank: int,
        gated: bool = True,
        interleaved: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        _check_max_rank(max_lora_rank)
        self.num_slots, self.num_experts = num_slots, num_experts
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.max_lora_rank, self.gated, self.interleaved, self.dtype = max_lora_rank, gated, interleaved, dtype
        shape = (num_slots, num_experts, len(PROJECTIONS))
        self.pointers = TablePointers(
            lora_rank=torch.zeros(shape, dtype=torch.int32, device=device),
            a_address=torch.zeros(shape, dtype=torch.int64, device=device),
            b_address=torch.zeros(shape, dtype=torch.int64, device=device),
            scale=torch.zeros(shape, dtype=torch.float32, device=device),
        )
        self._owned: dict[int, LayerAdapter] = {}

    def set_slot(self, adapter_slot: int, adapter: LayerAdapter) -> None:
        """Point adapter_slot at an adapter's slices; ordered on the current stream like any other write.

        The table keeps the slices alive until clear_slot or the next set_slot. A and B must be finite (in the fused
        path other rows meet them as exact zeros times B): the caller checks once, when it stages them. Raises
        ValueError for a slot, shape, dtype or rank that does not fit the layer.
        """
        self._check_slot(adapter_slot)
        if "gate_up" in adapter and ("gate" in adapter or "up" in adapter):
            raise ValueError("an adapter has either gate_up or gate and up, got both")
        rows = TablePointers(*(torch.zeros(t.shape[1:], dtype=t.dtype) for t in self.pointers))
        for name, piece in adapter.items():
            self._check_piece(name, piece)
            self._fill(rows, name, piece)
        for target, row in zip(self.pointers[:3], rows[:3], strict=True):
            target[adapter_slot].copy_(row)
        # Scales may live on the device already; they are copied there, so that nothing waits for it.
        for name, piece in adapter.items():
            for c in _columns(name):
                self.pointers.scale[adapter_slot, :, c].copy_(piece.scale)
        self._owned[adapter_slot] = dict(adapter)

    def raise_max_lora_rank(self, max_lora_rank: int) -> None:
        """Accept ranks up to this from now on.

        Launch shapes follow the limit: a graph captured before must be captured again, before a slot gets a rank
        over the limit that it was captured with.
        """
        _check_max_rank(max_lora_rank)
        self.max_lora_rank = max(self.max_lora_rank, max_lora_rank)

    def clear_slot(self, adapter_slot: int) -> None:
        """Make the slot an adapter without any pair; its rows then cost and change nothing."""
        self._check_slot(adapter_slot)
        self.pointers.lora_rank[adapter_slot].zero_()
        self._owned.pop(adapter_slot, None)

    def adapters(self) -> Mapping[int, LayerAdapter]:
        """Resident adapters by slot, for the reference implementation."""
        return dict(self._owned)

    def _check_slot(self, adapter_slot: int) -> None:
        if not 0 <= adapter_slot < self.num_slots:
            raise ValueError(f"adapter_slot must be 0..{self.num_slots - 1}, got {adapter_slot}")

    def _dims(self, name: str) -> tuple[int, int]:
        d, f = self.hidden_size, self.intermediate_size
        dims = (
            {"gate_up": (d, 2 * f), "gate": (d, f), "up": (d, f), "down": (f, d)}
            if self.gated
            else {"up": (d, f), "down": (f, d)}
        )
        if name not in dims:
            raise ValueError(f"unknown projection {name!r}: expected one of {sorted(dims)}")
        return dims[name]

    def _check_piece(self, name: str, piece: ProjectionSlice) -> None:
        in_size, out_size = self._dims(name)
        total = int(piece.lora_rank.sum())
        if piece.lora_rank.shape != (self.num_experts,) or piece.scale.shape != (self.num_experts,):
            raise ValueError(f"{name}: lora_rank and scale must have {self.num_experts} entries, one per local expert")
        if tuple(piece.a.shape) != (total, in_size) or piece.b.numel() != out_size * total:
            raise ValueError(
                f"{name}: ranks sum to {total}, expected A {(total, in_size)} and B of {out_size * total} elements, "
                f"got A {tuple(piece.a.shape)} and B of {piece.b.numel()}"
            )
        if piece.a.dtype != self.dtype or piece.b.dtype != self.dtype:
            raise ValueError(f"{name}: expected A and B of dtype {self.dtype}, got {piece.a.dtype} and {piece.b.dtype}")
        if not (piece.a.is_contiguous() and piece.b.is_contiguous()):
            raise ValueError(f"{name}: A and B must be contiguous")
        if piece.a.data_ptr() % 16 or piece.b.data_ptr() % 16:
            raise ValueError(f"{name}: A and B must start at 16-byte aligned addresses")
        if total and int(piece.lora_rank.max()) > self.max_lora_rank:
            raise ValueError(f"{name}: lora rank {int(piece.lora_rank.max())} is over the table's {self.max_lora_rank}")

    def _fill(self, rows: TablePointers, name: str, piece: ProjectionSlice) -> None:
        in_size, out_size = self._dims(name)
        ranks = piece.lora_rank.to(torch.int64)
        first = torch.cumsum(ranks, 0) - ranks
        size = piece.a.element_size()
        a_address = piece.a.data_ptr() + first * in_size * size
        b_address = piece.b.data_ptr() + first * out_size * size
        # The up half of a shared pair starts F rows of B later or, where the model interleaves them, one row later.
        up_rows = 1 if self.interleaved else self.intermediate_size
        for i, c in enumerate(_columns(name)):
            rows.lora_rank[:, c] = piece.lora_rank
            rows.a_address[:, c] = a_address
            rows.b_address[:, c] = b_address + i * up_rows * ranks * size
