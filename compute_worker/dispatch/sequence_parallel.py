"""Dispatch where the ranks of a group hold the same tokens: each sends its own part of them, and all get all results.

A part is a run of tokens with all that belongs to them: hidden states, choices, weights, and its own run of the extras.

Example: 5 tokens on both ranks of a group of 2: rank 0 sends tokens 0 and 1, rank 1 tokens 2 to 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from compute_worker.dispatch.base import ArrivedTokens, CombineHandle, Dispatcher, ExtraTensors


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceParallelHandle(CombineHandle):
    """The way back.

    Attributes:
        inner: of the part's dispatch.
        num_tokens_of_parts: tokens of each rank of the group.
    """

    inner: CombineHandle
    num_tokens_of_parts: tuple[int, ...]


class SequenceParallelDispatcher:
    """See the module. num_tokens_per_rank are the tokens that ranks hold, equal within each group of S ranks.

    Args:
        inner: sends the parts.
        group: process group of the S ranks that hold this rank's tokens; ranks S * i to S * i + S - 1 of all.
        num_parts: S.
        part: place of this rank in the group.
    """

    def __init__(self, inner: Dispatcher, *, group: dist.ProcessGroup, num_parts: int, part: int) -> None:
        self._inner = inner
        self._group = group
        self._num_parts = num_parts
        self._part = part
        self.same_arrivals_every_layer = inner.same_arrivals_every_layer
        # Padding would have to be agreed for parts instead of ranks.
        self.has_fixed_shapes = False

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
    ) -> tuple[ArrivedTokens, SequenceParallelHandle]:
        """See Dispatcher.dispatch."""
        count, num_tokens = self._num_parts, x_TD.shape[0]
        parts = [part_of(num_tokens, part, count) for part in range(count)]
        mine = parts[self._part]
        sizes = [part_of(held, rank % count, count) for rank, held in enumerate(num_tokens_per_rank)]
        arrived, inner = self._inner.dispatch(
            x_TD[mine],
            expert_TK[mine],
            weight_TK[mine],
            {name: extra[mine] for name, extra in extras.items()},
            rank_offsets=rank_offsets,
            num_tokens_per_rank=[part.stop - part.start for part in sizes],
        )
        return arrived, SequenceParallelHandle(
            num_tokens=num_tokens,
            max_tokens_per_rank=max(num_tokens_per_rank),
            inner=inner,
            num_tokens_of_parts=tuple(part.stop - part.start for part in parts),
        )

    def combine(self, y_ND: torch.Tensor, handle: CombineHandle) -> torch.Tensor:
        """See Dispatcher.combine; the results of all parts, on every rank of the group."""
        assert isinstance(handle, SequenceParallelHandle)
        y_PD = self._inner.combine(y_ND, handle.inner)
        # The last part is never smaller than another one.
        padded_PD = y_PD.new_zeros((handle.num_tokens_of_parts[-1], y_PD.shape[1]))
        padded_PD[: y_PD.shape[0]] = y_PD
        parts = [torch.empty_like(padded_PD) for _ in handle.num_tokens_of_parts]
        if handle.num_tokens:
            dist.all_gather(parts, padded_PD, group=self._group)
        return torch.cat([part[:count] for part, count in zip(parts, handle.num_tokens_of_parts, strict=True)])


def part_of(num_tokens: int, part: int, num_parts: int) -> slice:
    """Tokens of one part. Example: 5 tokens, 2 parts -> 0:2 and 2:5."""
    return slice(num_tokens * part // num_parts, num_tokens * (part + 1) // num_parts)
