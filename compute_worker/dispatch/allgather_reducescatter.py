"""Dispatch by all-gather: every token goes to every rank, in one packed row; the parts come back by reduce-scatter.

Ranks with fewer tokens than the fullest one send padding rows, whose experts and extras are -1, so that shapes depend
only on the number of tokens of the fullest rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from compute_worker.dispatch.base import ArrivedTokens, CombineHandle, ExtraTensors
from compute_worker.dispatch.packed_rows import pack_tokens, unpack_tokens
from compute_worker.ep_group import EPGroup

# torch 2.13 has new names for these two; 2.11 has the old ones only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class AllGatherDispatcher:
    """See the module. Works over NCCL and gloo; combine adds the ranks' parts in an order that never changes."""

    same_arrivals_every_layer = True
    has_fixed_shapes = True

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
        pad_to: int = 0,
    ) -> tuple[ArrivedTokens, CombineHandle]:
        """See Dispatcher.dispatch. N = G * pad_to, or G * tokens of the fullest rank."""
        group = self._group
        num_tokens, max_tokens = x_TD.shape[0], pad_to or max(num_tokens_per_rank)
        assert max_tokens >= max(num_tokens_per_rank), (pad_to, num_tokens_per_rank)
        assert num_tokens == num_tokens_per_rank[group.ep_rank], (num_tokens, num_tokens_per_rank, group.ep_rank)
        layout, send = pack_tokens(x_TD, weight_TK, expert_TK, extras, num_rows=max_tokens)
        received = torch.empty((group.num_ranks * max_tokens, layout.row_bytes), dtype=torch.uint8, device=x_TD.device)
        if max_tokens:
            _all_gather(received, send, group=group.data_group)
        first, end = rank_offsets[group.placement_rank], rank_offsets[group.placement_rank + 1]
        arrived = unpack_tokens(layout, received, sorted(extras), first=first, end=end)
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
