"""Dispatch by all-gather: every token goes to every rank, in one packed row; the parts come back by reduce-scatter.

A packed row holds: hidden state [D], weights float32 [K], physical experts int32 [K],
extras int32, one a name in sorted order. Ranks with fewer tokens than the fullest one send padding rows, whose experts
and extras are -1, so that shapes depend only on the number of tokens of the fullest rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from compute_worker.dispatch.base import ArrivedTokens, CombineHandle, ExtraTensors, local_slots
from compute_worker.dispatch.packed_rows import RowLayout
from compute_worker.ep_group import EPGroup

# torch 2.13 has new names for these two; 2.11 has the old ones only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class AllGatherDispatcher:
    """See the module. Works over NCCL and gloo; combine adds the ranks' parts in an order that never changes."""

    same_arrivals_every_layer = True

    def __init__(self, group: EPGroup) -> None:
        self._group = group

    def dispatch(
        self,
        x_TD: torch.Tensor,
        expert_TK: torch.Tensor,
        weight_TK: torch.Tensor,
        extras: ExtraTensors,
        *,
        rank_offsets: Sequence[int],
        num_tokens_per_rank: Sequence[int],
    ) -> tuple[ArrivedTokens, CombineHandle]:
        """See Dispatcher.dispatch. N = G * tokens of the fullest rank."""
        group = self._group
        num_tokens, max_tokens = x_TD.shape[0], max(num_tokens_per_rank)
        assert num_tokens == num_tokens_per_rank[group.ep_rank], (num_tokens, num_tokens_per_rank, group.ep_rank)
        names = sorted(extras)
        parts = [x_TD, weight_TK.float(), expert_TK.int(), *(extras[name].int().unsqueeze(1) for name in names)]
        layout = RowLayout.of(parts)
        send = torch.full((max_tokens, layout.row_bytes), 255, dtype=torch.uint8, device=x_TD.device)
        if max_tokens > num_tokens:
            # Bytes of 255 are -1 in the integer columns; in the float ones they would be NaN.
            send[num_tokens:, : layout.columns[2].start] = 0
        layout.write(send[:num_tokens], parts)
        received = torch.empty((group.num_ranks * max_tokens, layout.row_bytes), dtype=torch.uint8, device=x_TD.device)
        if max_tokens:
            _all_gather(received, send, group=group.data_group)
        views = layout.views(received)
        x_ND, weight_NK, expert_NK = views[:3]
        arrived = ArrivedTokens(
            x_ND=x_ND,
            slot_NK=local_slots(expert_NK, rank_offsets[group.ep_rank], rank_offsets[group.ep_rank + 1]),
            weight_NK=weight_NK,
            extras={name: view.squeeze(1) for name, view in zip(names, views[3:], strict=True)},
        )
        return arrived, CombineHandle(num_tokens=num_tokens, max_tokens_per_rank=max_tokens)

    def combine(self, y_ND: torch.Tensor, handle: CombineHandle) -> torch.Tensor:
        """See Dispatcher.combine."""
        num_ranks, max_tokens = self._group.num_ranks, handle.max_tokens_per_rank
        y_ND = y_ND.contiguous()
        if max_tokens == 0:
            return y_ND
        if y_ND.is_cuda:
            # NCCL adds in an order given by communicator, shape and rank alone.
            y_MD = y_ND.new_empty((max_tokens, y_ND.shape[1]))
            _reduce_scatter(y_MD, y_ND, group=self._group.data_group)
            return y_MD[: handle.num_tokens]
        parts_GMD = torch.empty_like(y_ND)
        dist.all_to_all_single(parts_GMD, y_ND, group=self._group.data_group)
        parts_GTD = parts_GMD.view(num_ranks, max_tokens, -1)[:, : handle.num_tokens]
        y_TD = parts_GTD[0].float()
        for part_TD in parts_GTD[1:]:
            y_TD = y_TD + part_TD.float()
        return y_TD.to(y_ND.dtype)
