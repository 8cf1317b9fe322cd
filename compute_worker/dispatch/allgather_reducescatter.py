"""Dispatch by all-gather: every token goes to every rank, in one packed row; the parts come back by reduce-scatter.

Ranks with fewer tokens than the fullest one send padding rows, whose experts and extras are -1, so that shapes depend
only on the number of tokens of the fullest rank. Where there are many tokens, copying hidden states into rows and out
of them would cost more than a second tensor: these go as they are, in one launch with rows of all the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from compute_worker.collectives import all_gather, reduce_scatter
from compute_worker.dispatch.base import ArrivedTokens, CombineHandle, ExtraTensors, rows_of_each_rank
from compute_worker.dispatch.packed_rows import pack_tokens, unpack_tokens
from compute_worker.ep_group import EPGroup

SPLIT_BYTES = 1 << 20
"""Hidden states of one rank from which on they are sent as they are: measured on two H200."""


class AllGatherDispatcher:
    """See the module. Works over NCCL and gloo; combine adds the ranks' parts in an order that never changes.

    Args:
        group: the ranks.
        split_bytes: see SPLIT_BYTES.
    """

    same_arrivals_every_layer = True
    has_fixed_shapes = True

    def __init__(self, group: EPGroup, *, split_bytes: int = SPLIT_BYTES) -> None:
        self._group = group
        self._split_bytes = split_bytes

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
        max_tokens = rows_of_each_rank(x_TD, num_tokens_per_rank, pad_to, ep_rank=group.ep_rank)
        splits = max_tokens * x_TD.shape[1] * x_TD.element_size() >= self._split_bytes
        x_packed = x_TD[:, :0] if splits else x_TD
        layout, send = pack_tokens(x_packed, weight_TK, expert_TK, extras, num_rows=max_tokens)
        received = send.new_empty((group.num_ranks * max_tokens, layout.row_bytes))
        pairs = [(received, send)]
        if splits:
            x_MD = _padded(x_TD, max_tokens)
            pairs.append((x_MD.new_empty((group.num_ranks * max_tokens, x_MD.shape[1])), x_MD))
        if max_tokens:
            self._gather(pairs)
        first, end = rank_offsets[group.placement_rank], rank_offsets[group.placement_rank + 1]
        arrived = unpack_tokens(layout, received, sorted(extras), first=first, end=end)
        if splits:
            arrived = replace(arrived, x_ND=pairs[1][0])
        return arrived, CombineHandle(num_tokens=x_TD.shape[0], max_tokens_per_rank=max_tokens)

    def _gather(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """All-gathers (received, send) of each pair; several in one launch of NCCL."""
        group = self._group.data_group
        if len(pairs) > 1 and pairs[0][0].is_cuda:
            with dist._coalescing_manager(group=group, device=pairs[0][0].device):  # type: ignore[attr-defined]
                for received, send in pairs:
                    # As bytes: tensors of one launch have one type.
                    all_gather(received.view(torch.uint8), send.view(torch.uint8), group=group)
            return
        for received, send in pairs:
            all_gather(received, send, group=group)

    def combine(self, y_ND: torch.Tensor, handle: CombineHandle) -> torch.Tensor:
        """See Dispatcher.combine."""
        num_ranks, max_tokens = self._group.num_ranks, handle.max_tokens_per_rank
        y_ND = y_ND.contiguous()
        if max_tokens == 0:
            return y_ND
        if y_ND.is_cuda:
            # NCCL adds in an order given by communicator, shape and rank alone.
            y_MD = y_ND.new_empty((max_tokens, y_ND.shape[1]))
            reduce_scatter(y_MD, y_ND, group=self._group.data_group)
            return y_MD[: handle.num_tokens]
        parts_GMD = torch.empty_like(y_ND)
        dist.all_to_all_single(parts_GMD, y_ND, group=self._group.data_group)
        parts_GTD = parts_GMD.view(num_ranks, max_tokens, -1)[:, : handle.num_tokens]
        y_TD = parts_GTD[0].float()
        for part_TD in parts_GTD[1:]:
            y_TD = y_TD + part_TD.float()
        return y_TD.to(y_ND.dtype)


def _padded(x_TD: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Contiguous, with rows of zeros after the last."""
    if x_TD.shape[0] == num_rows:
        return x_TD.contiguous()
    x_MD = x_TD.new_zeros((num_rows, x_TD.shape[1]))
    x_MD[: x_TD.shape[0]] = x_TD
    return x_MD
