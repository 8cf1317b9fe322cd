"""Calls of ExpertService that wait on this rank, and how they are put together into expert steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from epilora.errors import EpiloraError, FailedPreconditionError


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertCall:
    """One MoE layer on T tokens."""

    layer: int
    x_TD: torch.Tensor
    """[T, D] in the model's dtype, on the CPU or the device."""
    topk: tuple[torch.Tensor, torch.Tensor] | None
    """int32 logical expert ids [T, K] and float32 weights [T, K]; None: the layer's own router."""
    adapter_generations: tuple[int, ...]
    """One per token, 0 for the base model."""
    routed_only: bool
    result: Future[torch.Tensor]
    """[T, D]; completed by the step thread."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.x_TD.shape[0]

    def goes_with(self, other: ExpertCall) -> bool:
        """Whether both can be one batch."""
        return (self.layer, self.topk is None, self.routed_only) == (other.layer, other.topk is None, other.routed_only)


class ExpertQueue:
    """First come, first served; calls that fit the first one's batch go along with it.

    A step may be planned before the one ahead of it has run. What is planned is computed: the other ranks count on it.

    Args:
        max_num_tokens: tokens in one batch; a single larger call is a batch of its own.
        slot_of: adapter slot of a generation, None if it is not active on this rank.
        is_staged: whether a generation is resident and about to be activated.
    """

    def __init__(
        self, *, max_num_tokens: int, slot_of: Callable[[int], int | None], is_staged: Callable[[int], bool]
    ) -> None:
        self._max_num_tokens = max_num_tokens
        self._slot_of = slot_of
        self._is_staged = is_staged
        self._waiting: deque[ExpertCall] = deque()
        self._planned: list[ExpertCall] = []

    def __len__(self) -> int:
        return len(self._waiting) + len(self._planned)

    @property
    def num_waiting(self) -> int:
        """Calls that are in no plan yet."""
        return len(self._waiting)

    def add(self, call: ExpertCall) -> None:
        """Puts a call at the end of the queue."""
        self._waiting.append(call)

    def uses(self, generation: int) -> bool:
        """Whether a call, waiting or planned, needs a generation of an adapter."""
        return any(generation in call.adapter_generations for call in (*self._planned, *self._waiting))

    def plan(self) -> list[ExpertCall]:
        """Calls of the next batch, all of one layer; they keep their adapters until `finish`."""
        while self._waiting and not self._accept(self._waiting[0]):
            self._waiting.popleft()
        # Another rank may have applied an activation a moment before this one.
        if not self._waiting or not self._is_active(self._waiting[0]):
            return []
        first = self._waiting.popleft()
        batch, total = [first], first.num_tokens
        while self._waiting:
            call = self._waiting[0]
            if not call.goes_with(first) or total + call.num_tokens > self._max_num_tokens:
                break
            if not self._is_active(call) or call.result.cancelled():
                break
            batch.append(self._waiting.popleft())
            total += call.num_tokens
        self._planned += batch
        return batch

    def finish(self, batch: list[ExpertCall]) -> None:
        """Takes calls out that were computed."""
        done = {id(call) for call in batch}
        self._planned = [call for call in self._planned if id(call) not in done]

    def fail_all(self, error: EpiloraError) -> None:
        """Ends every call with an error."""
        for call in (*self._planned, *self._waiting):
            if call.result.set_running_or_notify_cancel():
                call.result.set_exception(error)
        self._planned.clear()
        self._waiting.clear()

    def _is_active(self, call: ExpertCall) -> bool:
        return all(self._slot_of(g) is not None for g in set(call.adapter_generations) - {0})

    def _accept(self, call: ExpertCall) -> bool:
        """False, with the call failed, if it was cancelled or needs an adapter that is not here and not about to be."""
        if call.result.cancelled():
            return False
        needed = set(call.adapter_generations) - {0}
        missing = sorted(g for g in needed if self._slot_of(g) is None and not self._is_staged(g))
        if missing and call.result.set_running_or_notify_cancel():
            call.result.set_exception(
                FailedPreconditionError(
                    f"layer {call.layer}: adapter generations {missing} are not resident on this rank; load them first",
                    reason="ADAPTER_NOT_RESIDENT",
                )
            )
        return not missing


def join(batch: list[ExpertCall]) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None, list[int]]:
    """x [sum T, D], top-k or None, and the generation of each token, of calls that go together."""
    x_TD = torch.cat([call.x_TD for call in batch])
    topks = [call.topk for call in batch if call.topk is not None]
    topk = (torch.cat([ids for ids, _ in topks]), torch.cat([weights for _, weights in topks])) if topks else None
    generations = [g for call in batch for g in call.adapter_generations]
    return x_TD, topk, generations
