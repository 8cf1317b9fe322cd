"""Dispatch between GPUs of one host by writing into each other's memory, without a collective: see kernels.one_sided.

A token keeps its place among the rows of all ranks, as under all-gather, but its hidden state is written only to the
ranks that hold one of its experts, and only these write a part back. So shapes depend on the numbers of tokens alone, a
graph can replay it, no host waits for counts, and no more travels than under all-to-all. Parts are added in order of
rank.

A place that nobody wrote to holds an older token's hidden state, which no expert reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compute_worker.dispatch.base import ArrivedTokens, CombineHandle, Dispatcher, ExtraTensors, rows_of_each_rank
from compute_worker.dispatch.packed_rows import stacked_extras
from compute_worker.dispatch.peer_memory import PeerMemory
from compute_worker.ep_group import EPGroup
from compute_worker.kernels.one_sided import MAX_PROGRAMS, Areas, Peers, Tiles, send_parts, send_tokens

_ALIGNMENT = 256
_WORD_BYTES = 4
_SLOT_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class OneSidedHandle(CombineHandle):
    """The way back.

    Attributes:
        areas: of the dispatch.
        slot_NK: what arrived.
        expert_TK: of this rank's tokens.
        bounds: (first, end) physical expert of each rank, int64 [G] each.
    """

    areas: Areas
    slot_NK: torch.Tensor
    expert_TK: torch.Tensor
    bounds: tuple[torch.Tensor, torch.Tensor]


class OneSidedDispatcher:
    """See the module.

    Args:
        group: the ranks.
        memory: of these ranks; other dispatchers may use it, too, if all ranks call them in the same order.
        overflow: takes steps whose rows do not fit into the memory, on all ranks alike.
        tiles: see Tiles; by default what the memory allows.
    """

    same_arrivals_every_layer = True
    has_fixed_shapes = True

    def __init__(self, group: EPGroup, memory: PeerMemory, *, overflow: Dispatcher, tiles: Tiles | None = None) -> None:
        self._group = group
        self._memory = memory
        self._overflow = overflow
        self._tiles = tiles or Tiles(max_programs=memory.max_programs)
        self._peers = Peers(
            rank=group.ep_rank,
            num_ranks=group.num_ranks,
            table_G=memory.table_G,
            turn_P=memory.turn_P,
        )
        self._bounds: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self._middle = _middle(group.num_ranks, memory.local.shape[0])

    @staticmethod
    def num_bytes(
        *, num_ranks: int, num_rows: int, hidden: int, element_bytes: int, top_k: int, num_extras: int
    ) -> int:
        """Bytes of each rank's memory for so many rows of every rank."""
        rows = num_ranks * num_rows
        small = _up(rows * top_k * _SLOT_BYTES) + _up(rows * top_k * 4) + _up(rows * num_extras * 4)
        return _flag_bytes(num_ranks) + 2 * (_up(rows * hidden * element_bytes) + small)

    def dispatch(
        self,
        x_TD: torch.Tensor,
        expert_TK: torch.Tensor,
        weight_TK: torch.Tensor,
        extras: ExtraTensors,
        *,
        rank_offsets: Sequence[int],
        num_tokens_per_rank: Sequence[int],
        pad_to: int = 0,
    ) -> tuple[ArrivedTokens, CombineHandle]:
        """See Dispatcher.dispatch. N = G * pad_to, or G * tokens of the fullest rank."""
        num_rows = rows_of_each_rank(x_TD, num_tokens_per_rank, pad_to, ep_rank=self._group.ep_rank)
        areas = self._areas(x_TD, expert_TK.shape[1], len(extras), num_rows)
        if areas is None:
            return self._overflow.dispatch(
                x_TD,
                expert_TK,
                weight_TK,
                extras,
                rank_offsets=rank_offsets,
                num_tokens_per_rank=num_tokens_per_rank,
                pad_to=pad_to,
            )
        expert_TK, bounds = expert_TK.contiguous(), self._bounds_of(rank_offsets)
        send_tokens(
            self._peers,
            areas,
            self._tiles,
            x_TD=x_TD.contiguous(),
            weight_TK=weight_TK.contiguous(),
            expert_TK=expert_TK,
            extra_TX=stacked_extras(extras, x_TD).contiguous(),
            first_G=bounds[0],
            end_G=bounds[1],
            num_rows=num_rows,
        )
        arrived = self._arrived(areas, x_TD, expert_TK.shape[1], sorted(extras), num_rows)
        return arrived, OneSidedHandle(
            num_tokens=x_TD.shape[0],
            max_tokens_per_rank=num_rows,
            areas=areas,
            slot_NK=arrived.slot_NK,
            expert_TK=expert_TK,
            bounds=bounds,
        )

    def combine(self, y_ND: torch.Tensor, handle: CombineHandle) -> torch.Tensor:
        """See Dispatcher.combine."""
        if not isinstance(handle, OneSidedHandle):
            return self._overflow.combine(y_ND, handle)
        return send_parts(
            self._peers,
            handle.areas,
            self._tiles,
            y_ND=y_ND.contiguous(),
            slot_NK=handle.slot_NK,
            expert_TK=handle.expert_TK,
            first_G=handle.bounds[0],
            end_G=handle.bounds[1],
            num_rows=handle.max_tokens_per_rank,
        )

    def _areas(self, x_TD: torch.Tensor, top_k: int, num_extras: int, num_rows: int) -> Areas | None:
        """Where the parts of these rows are; None if there are none, or they do not fit, on every rank alike.

        What dispatch writes lies in the first half, what combine writes in the second one, whatever the numbers: each
        half is safe from its own kernel's next launch only.
        """
        hidden_bytes = x_TD.shape[1] * x_TD.element_size()
        if num_rows == 0 or hidden_bytes % _WORD_BYTES or hidden_bytes == 0:
            return None
        rows = self._group.num_ranks * num_rows
        x = _flag_bytes(self._group.num_ranks)
        slot = x + _up(rows * hidden_bytes)
        weight = slot + _up(rows * top_k * _SLOT_BYTES)
        extra = weight + _up(rows * top_k * 4)
        fits = extra + _up(rows * num_extras * 4) <= self._middle
        fits = fits and self._middle + rows * hidden_bytes <= self._memory.local.shape[0]
        return Areas(x=x, slot=slot, weight=weight, extra=extra, part=self._middle) if fits else None

    def _arrived(
        self, areas: Areas, x_TD: torch.Tensor, top_k: int, names: Sequence[str], num_rows: int
    ) -> ArrivedTokens:
        rows = self._group.num_ranks * num_rows

        def view(at: int, dtype: torch.dtype, shape: tuple[int, int]) -> torch.Tensor:
            part = self._memory.local[at : at + shape[0] * shape[1] * dtype.itemsize]
            return part.view(dtype).view(shape)

        extra_XN = view(areas.extra, torch.int32, (len(names), rows)) if names else ()
        return ArrivedTokens(
            x_ND=view(areas.x, x_TD.dtype, (rows, x_TD.shape[1])),
            slot_NK=view(areas.slot, torch.int64, (rows, top_k)),
            weight_NK=view(areas.weight, torch.float32, (rows, top_k)),
            extras=dict(zip(names, extra_XN, strict=True)),
        )

    def _bounds_of(self, rank_offsets: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """First physical expert of each rank, and the one after its last. Kept, since copies to a device take time."""
        key = tuple(rank_offsets)
        if key not in self._bounds:
            placed = [rank // self._group.expert_tp for rank in range(self._group.num_ranks)]
            self._bounds[key] = (
                torch.tensor([key[rank] for rank in placed], device=self._memory.local.device),
                torch.tensor([key[rank + 1] for rank in placed], device=self._memory.local.device),
            )
        return self._bounds[key]


def _middle(num_ranks: int, num_bytes: int) -> int:
    """Where combine's half begins."""
    flags = _flag_bytes(num_ranks)
    return flags + (num_bytes - flags) // 2 // _ALIGNMENT * _ALIGNMENT


def _flag_bytes(num_ranks: int) -> int:
    return _up(num_ranks * MAX_PROGRAMS * 4)


def _up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
