"""Where the kernels find each adapter's A and B: device tables of addresses, ranks and scales.

A table belongs to one expert layer. The adapters' own tensors stay where the adapter pool put them, in the slice
layout (blocks of local experts one after another, each with its own lora rank, nothing padded); the table only points
into them. Changing a slot rewrites small device tensors in place, so a captured CUDA graph sees the new adapter at
its next replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    """The device tensors, [num_slots, e, 3] each."""

    lora_rank: torch.Tensor
    a_address: torch.Tensor
    b_address: torch.Tensor
    scale: torch.Tensor


class KernelTable(NamedTuple):
    """A table as the kernels take it: its pointers, and what all slots have in common."""

    lora_rank: torch.Tensor
    a_address: torch.Tensor
    b_address: torch.Tensor
    scale: torch.Tensor
    widest: torch.Tensor
    """int32 [1]: the largest resident rank, or -1 where some rank is no multiple of 8 and needs narrow loads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRows:
    """What a table is to hold of one adapter: made by any thread, put into a slot by the one that computes."""

    adapter: LayerAdapter
    pointers: TablePointers
    """[e, 3] each; of `AdapterTable.rows_of` on the CPU and without scales, of `place_rows` whole and on the device."""
    largest_rank: int
    whole_blocks: bool
    """Every rank is a multiple of 8."""


def place_rows(rows: Sequence[TableRows], device: torch.device) -> list[TableRows]:
    """Brings the rows of many layers to the device, with one copy for each kind and without waiting for them.

    The results are views of four tensors; whoever frees those tells the streams that read them.
    """
    kinds = zip(*(row.pointers for row in rows), strict=True)
    parts = [_to_device(torch.cat([part.flatten() for part in kind]), device) for kind in kinds]
    sizes = [row.pointers.lora_rank.numel() for row in rows]
    shapes = [row.pointers.lora_rank.shape for row in rows]
    placed = []
    for row, shape, pointers in zip(
        rows, shapes, zip(*(torch.split(part, sizes) for part in parts), strict=True), strict=True
    ):
        views = TablePointers(*(part.view(shape) for part in pointers))
        # Scales may live on the device already; they are copied there, so that nothing waits for it.
        for name, piece in row.adapter.items():
            for c in _columns(name):
                views.scale[:, c].copy_(piece.scale)
        placed.append(replace(row, pointers=views))
    return placed


def _to_device(flat: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Pinned, or the copy would wait for the device; the allocator keeps the memory until the copy is done."""
    return flat.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else flat


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
        self._widest = torch.zeros(1, dtype=torch.int32, device=device)
        self._widest_of_slot: dict[int, int] = {}
        self._owned: dict[int, LayerAdapter] = {}

    @property
    def for_kernels(self) -> KernelTable:
        """The tensors that kernels read; they stay the same ones whatever the slots hold."""
        return KernelTable(*self.pointers, self._widest)

    def set_slot(self, adapter_slot: int, adapter: LayerAdapter) -> None:
        """Point adapter_slot at an adapter's slices; ordered on the current stream like any other write, never waits.

        The table keeps the slices alive until clear_slot or the next set_slot. A and B must be finite (in the fused
        path other rows meet them as exact zeros times B): the caller checks once, when it stages them. Raises
        ValueError for a slot, shape, dtype or rank that does not fit the layer.
        """
        self._check_slot(adapter_slot)
        self.set_rows(adapter_slot, place_rows([self.rows_of(adapter)], self.pointers.scale.device)[0])

    def rows_of(self, adapter: LayerAdapter) -> TableRows:
        """The host's part of set_slot, of a table of this layer's shapes. Any thread.

        Raises:
            ValueError: a shape or dtype does not fit the layer.
        """
        if "gate_up" in adapter and ("gate" in adapter or "up" in adapter):
            raise ValueError("an adapter has either gate_up or gate and up, got both")
        shape = (self.num_experts, len(PROJECTIONS))
        rows = TablePointers(*(torch.zeros(shape, dtype=tensor.dtype) for tensor in self.pointers))
        for name, piece in adapter.items():
            self._check_piece(name, piece)
            self._fill(rows, name, piece)
        ranks = rows.lora_rank.numpy()
        return TableRows(
            adapter=adapter,
            pointers=rows,
            largest_rank=int(ranks.max(initial=0)),
            whole_blocks=not bool((ranks % 8).any()),
        )

    def set_rows(self, adapter_slot: int, rows: TableRows) -> None:
        """The device's part of set_slot: rows of place_rows. Raises ValueError for a slot or rank that does not fit."""
        self._check_slot(adapter_slot)
        if rows.largest_rank > self.max_lora_rank:
            raise ValueError(f"lora rank {rows.largest_rank} is over the table's {self.max_lora_rank}")
        for target, row in zip(self.pointers, rows.pointers, strict=True):
            target[adapter_slot].copy_(row)
        self._owned[adapter_slot] = dict(rows.adapter)
        self._set_widest(adapter_slot, rows.largest_rank if rows.whole_blocks else -1)

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
        self._set_widest(adapter_slot, 0)

    def adapters(self) -> Mapping[int, LayerAdapter]:
        """Resident adapters by slot, for the reference implementation."""
        return dict(self._owned)

    def _set_widest(self, adapter_slot: int, widest: int) -> None:
        self._widest_of_slot[adapter_slot] = widest
        values = self._widest_of_slot.values()
        self._widest.fill_(-1 if min(values) < 0 else max(values))

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
        total = int(piece.lora_rank.numpy().sum())
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

    def _fill(self, rows: TablePointers, name: str, piece: ProjectionSlice) -> None:
        in_size, out_size = self._dims(name)
        ranks = piece.lora_rank.numpy().astype("int64")
        first = ranks.cumsum() - ranks
        size = piece.a.element_size()
        a_address = piece.a.data_ptr() + first * in_size * size
        b_address = piece.b.data_ptr() + first * out_size * size
        # The up half of a shared pair starts F rows of B later or, where the model interleaves them, one row later.
        up_rows = 1 if self.interleaved else self.intermediate_size
        for i, c in enumerate(_columns(name)):
            rows.lora_rank.numpy()[:, c] = ranks
            rows.a_address.numpy()[:, c] = a_address
            rows.b_address.numpy()[:, c] = b_address + i * up_rows * ranks * size
