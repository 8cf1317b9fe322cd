"""Dispatch within one rank: nothing moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compute_worker.dispatch.base import ArrivedTokens, CombineHandle, ExtraTensors


class LocalDispatcher:
    """The backend of a group of one rank."""

    same_arrivals_every_layer = True
    has_fixed_shapes = True

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
        """See Dispatcher.dispatch."""
        num_tokens = x_TD.shape[0]
        assert rank_offsets[0] == 0, rank_offsets
        assert list(num_tokens_per_rank) == [num_tokens], (num_tokens_per_rank, num_tokens)
        arrived = ArrivedTokens(
            x_ND=x_TD,
            # All physical experts are here, so ids are slots.
            slot_NK=expert_TK.long(),
            weight_NK=weight_TK.float(),
            extras=extras,
        )
        return arrived, CombineHandle(num_tokens=num_tokens, max_tokens_per_rank=num_tokens)

    def combine(self, y_ND: torch.Tensor, handle: CombineHandle) -> torch.Tensor:
        """See Dispatcher.combine."""
        assert y_ND.shape[0] == handle.num_tokens, (y_ND.shape, handle)
        return y_ND
