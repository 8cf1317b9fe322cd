"""What every way of sending rows to their experts has in common.

Legend: T tokens of this rank, N tokens that arrived, K experts a token, D model width, G ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

ExtraTensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrivedTokens:
    """Tokens on the rank of (some of) their experts. A row is one (token, chosen expert) pair.

    Attributes:
        x_ND: hidden states, in the model's dtype.
        slot_NK: int64; local slot of each chosen expert, -1 where the expert lives elsewhere or the token is padding.
        weight_NK: float32; weight of each expert's output.
        extras: per-token tensors [N] that travelled along, by the names given to dispatch; padding tokens hold -1.
    """

    x_ND: torch.Tensor
    slot_NK: torch.Tensor
    weight_NK: torch.Tensor
    extras: ExtraTensors


@dataclass(frozen=True, kw_only=True, slots=True)
class CombineHandle:
    """What combine needs to know of its dispatch."""

    num_tokens: int
    max_tokens_per_rank: int


class Dispatcher(Protocol):
    """Moves tokens of one MoE layer between ranks. Every rank calls it for every layer, in the same order."""

    same_arrivals_every_layer: bool
    """True if the same tokens arrive on this rank, in the same order, at every layer of a step."""
    has_fixed_shapes: bool
    """True if launches depend on nothing but the shapes of the arguments, so that a graph can replay them."""

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
        """Sends each token to the ranks of its experts.

        Args:
            x_TD: hidden states.
            expert_TK: int; physical expert ids, -1 for none.
            weight_TK: any float dtype.
            extras: int32 [T] tensors that travel along.
            rank_offsets: first physical expert of each rank of the placement, then their number.
            num_tokens_per_rank: T of every rank, agreed before.
            pad_to: rows of each rank, agreed before, where a backend sends as many rows from every rank; 0: the most
                that a rank has.
        """
        ...

    def combine(self, y_ND: torch.Tensor, handle: CombineHandle) -> torch.Tensor:
        """Brings results back and adds the ranks' parts in order of rank.

        Args:
            y_ND: this rank's part of each arrived token's result: its local experts' outputs, weighted and added.
            handle: from the dispatch of the same tokens.

        Returns:
            y_TD in the dtype of y_ND.
        """
        ...


def rows_of_each_rank(x_TD: torch.Tensor, num_tokens_per_rank: Sequence[int], pad_to: int, *, ep_rank: int) -> int:
    """Rows of every rank where a backend sends as many from each: see Dispatcher.dispatch, whose arguments it checks.

    Example: tokens of ranks [3, 5], pad_to 0 -> 5; pad_to 8 -> 8.
    """
    num_rows = pad_to or max(num_tokens_per_rank)
    assert num_rows >= max(num_tokens_per_rank), (pad_to, num_tokens_per_rank)
    assert x_TD.shape[0] == num_tokens_per_rank[ep_rank], (x_TD.shape, num_tokens_per_rank, ep_rank)
    return num_rows


def local_slots(expert_NK: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Local slot of each physical expert in [first, end), -1 for others.

    Example: expert_NK [[4, 9], [-1, 5]], first 4, end 8 -> [[0, -1], [-1, 1]].
    """
    expert_NK = expert_NK.long()
    here = (expert_NK >= first) & (expert_NK < end)
    return torch.where(here, expert_NK - first, -1)
