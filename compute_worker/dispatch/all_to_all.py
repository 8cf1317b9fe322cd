"""Dispatch by all-to-all: a token goes only to the ranks that hold one of its experts, once to each.

A packed row holds: hidden state [D], weights float32 [K], physical experts int32 [K], the token's place among the
tokens of all ranks int32, extras int32, one a name in sorted order. How many rows go from rank to rank is known only
when the router has chosen, so the ranks exchange these counts first, and the host waits for them.

Tokens keep their place among the tokens of all ranks where they arrive, and the places of those that did not come hold
padding. So shapes, and where a token's row stands, depend on the numbers of tokens alone, and a token's bits not on
what other tokens' routers chose. Padding costs elementwise work, but no matrix product and no transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from compute_worker.dispatch.base import ArrivedTokens, CombineHandle, ExtraTensors, local_slots
from compute_worker.dispatch.packed_rows import RowLayout
from compute_worker.ep_group import EPGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class AllToAllHandle(CombineHandle):
    """The way back.

    Attributes:
        sent_tokens: this rank's tokens that went to each rank, int64, ascending.
        num_received: rows that came from each rank.
        place_S: int64; places of the rows that came, in their order.
    """

    sent_tokens: tuple[torch.Tensor, ...]
    num_received: tuple[int, ...]
    place_S: torch.Tensor


class AllToAllDispatcher:
    """See the module. Works over NCCL and gloo; combine adds the ranks' parts in order of rank, in float32.

    Attributes:
        num_pairs_sent: per rank, (token, rank) pairs sent there since the start, those to this rank itself included.
    """

    same_arrivals_every_layer = False
    has_fixed_shapes = False

    def __init__(self, group: EPGroup) -> None:
        self._group = group
        self._rank_ends: dict[tuple[int, ...], torch.Tensor] = {}
        self.num_pairs_sent = [0] * group.num_ranks

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
    ) -> tuple[ArrivedTokens, AllToAllHandle]:
        """See Dispatcher.dispatch. N = tokens of all ranks."""
        group, device = self._group, x_TD.device
        num_tokens, first = x_TD.shape[0], sum(num_tokens_per_rank[: group.ep_rank])
        assert num_tokens == num_tokens_per_rank[group.ep_rank], (num_tokens, num_tokens_per_rank, group.ep_rank)
        names = sorted(extras)
        place_T1 = torch.arange(first, first + num_tokens, dtype=torch.int32, device=device).unsqueeze(1)
        parts = [x_TD, weight_TK.float(), expert_TK.int(), place_T1]
        parts += [extras[name].int().unsqueeze(1) for name in names]
        layout = RowLayout.of(parts)
        rows = torch.zeros((num_tokens, layout.row_bytes), dtype=torch.uint8, device=device)
        layout.write(rows, parts)

        needed_TP = needed_by_rank(expert_TK, self._ends(rank_offsets, device))
        # Every rank that holds a part of an expert needs its tokens.
        needed_GT = needed_TP.repeat_interleave(group.expert_tp, dim=1).t()
        num_sent, num_received = self._exchange_counts(needed_GT)
        token_S = needed_GT.nonzero()[:, 1]
        received = torch.empty((sum(num_received), layout.row_bytes), dtype=torch.uint8, device=device)
        if any(num_tokens_per_rank):
            # Rows are gathered as int64, not byte by byte.
            send = rows.view(torch.int64)[token_S].view(torch.uint8)
            dist.all_to_all_single(received, send, num_received, num_sent, group=group.data_group)
        self.num_pairs_sent = [total + more for total, more in zip(self.num_pairs_sent, num_sent, strict=True)]
        arrived, place_S = _put_in_place(
            layout.views(received),
            names,
            num_places=sum(num_tokens_per_rank),
            slots=(rank_offsets[group.placement_rank], rank_offsets[group.placement_rank + 1]),
        )
        return arrived, AllToAllHandle(
            num_tokens=num_tokens,
            max_tokens_per_rank=max(num_tokens_per_rank),
            sent_tokens=torch.split(token_S, num_sent),
            num_received=tuple(num_received),
            place_S=place_S,
        )

    def combine(self, y_ND: torch.Tensor, handle: CombineHandle) -> torch.Tensor:
        """See Dispatcher.combine."""
        assert isinstance(handle, AllToAllHandle)
        num_sent = [tokens.shape[0] for tokens in handle.sent_tokens]
        parts_SD = y_ND.new_empty((sum(num_sent), y_ND.shape[1]))
        if handle.max_tokens_per_rank:
            dist.all_to_all_single(
                parts_SD.view(torch.uint8),
                y_ND[handle.place_S].view(torch.uint8),
                num_sent,
                list(handle.num_received),
                group=self._group.data_group,
            )
        y_TD = torch.zeros((handle.num_tokens, y_ND.shape[1]), dtype=torch.float32, device=y_ND.device)
        for tokens, part_SD in zip(handle.sent_tokens, torch.split(parts_SD, num_sent), strict=True):
            # A token stands once at most in each part: nothing is added in an order left to chance.
            y_TD[tokens] += part_SD.float()
        return y_TD.to(y_ND.dtype)

    def _exchange_counts(self, needed_GT: torch.Tensor) -> tuple[list[int], list[int]]:
        """Rows to send to each rank, and to receive from each. Waits for the device."""
        sent_G = needed_GT.sum(dim=1)
        received_G = torch.empty_like(sent_G)
        dist.all_to_all_single(received_G, sent_G, group=self._group.data_group)
        num_sent, num_received = torch.stack((sent_G, received_G)).tolist()
        return num_sent, num_received

    def _ends(self, rank_offsets: Sequence[int], device: torch.device) -> torch.Tensor:
        """int64 [G]: end of each rank's physical experts. Kept, since each copy to a device takes its time."""
        key = tuple(rank_offsets[1:])
        if key not in self._rank_ends:
            self._rank_ends[key] = torch.tensor(key, dtype=torch.int64, device=device)
        return self._rank_ends[key]


def needed_by_rank(expert_TK: torch.Tensor, rank_end_G: torch.Tensor) -> torch.Tensor:
    """bool [T, G]: which ranks hold at least one of a token's experts.

    Semantics: needed[t, g] = any_k(end[g - 1] <= expert[t, k] < end[g]); experts -1 are on no rank.

    Example: expert_TK [[0, 1], [5, -1]], ends [2, 4, 6] -> [[True, False, False], [False, False, True]].
    """
    num_ranks = rank_end_G.shape[0]
    rank_TK = torch.bucketize(expert_TK.long(), rank_end_G, right=True)
    rank_TK = torch.where(expert_TK < 0, num_ranks, rank_TK)
    needed = torch.zeros((expert_TK.shape[0], num_ranks + 1), dtype=torch.bool, device=expert_TK.device)
    needed.scatter_(1, rank_TK, True)
    return needed[:, :num_ranks]


def _put_in_place(
    views: Sequence[torch.Tensor], names: Sequence[str], *, num_places: int, slots: tuple[int, int]
) -> tuple[ArrivedTokens, torch.Tensor]:
    """The tokens that came, each at its place, padding elsewhere; and the places int64 [S] in order of arrival."""
    x_SD, weight_SK, expert_SK, place_S1, *extra_S1 = views
    place_S = place_S1.squeeze(1).long()
    x_ND = x_SD.new_zeros((num_places, x_SD.shape[1]))
    x_ND[place_S] = x_SD
    weight_NK = weight_SK.new_zeros((num_places, weight_SK.shape[1]))
    weight_NK[place_S] = weight_SK
    expert_NK = expert_SK.new_full((num_places, expert_SK.shape[1]), -1)
    expert_NK[place_S] = expert_SK
    extras = {}
    for name, view_S1 in zip(names, extra_S1, strict=True):
        extras[name] = view_S1.new_full((num_places,), -1)
        extras[name][place_S] = view_S1.squeeze(1)
    arrived = ArrivedTokens(x_ND=x_ND, slot_NK=local_slots(expert_NK, *slots), weight_NK=weight_NK, extras=extras)
    return arrived, place_S
