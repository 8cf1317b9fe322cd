"""Continuous batching on one rank: which tokens of which sequences go into the next step.

First come, first served. Each running sequence that is past its prompt gets its one token;
what is left of the token budget goes to prompts, in chunks. Waiting sequences are admitted while
there is a place and all the key/value blocks they can ever need are free. A running sequence keeps
its place to the end: recurrent layers keep its state there.

A step may be planned before the one ahead of it has run. Its chunks are promised then, since the other ranks
count on them: they are computed even if their sequence turns out to have ended, or is cancelled, in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from compute_worker.kv_blocks import KVBlockPool
from compute_worker.requests import Sequence
from epilora.errors import EpiloraError, FailedPreconditionError


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Tokens [start, start + length) of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    length: int

    @property
    def completes(self) -> bool:
        """True if the step yields the sequence's next token."""
        return self.start + self.length == len(self.sequence.token_ids)


class Scheduler:
    """The sequences of one rank.

    Args:
        blocks: key/value blocks.
        max_num_sequences: sequences running at once.
        max_num_batched_tokens: tokens in one step.
        slot_of: adapter slot of a generation, None if it is not active on this rank.
        is_staged: whether a generation is resident and about to be activated.
    """

    def __init__(
        self,
        *,
        blocks: KVBlockPool,
        max_num_sequences: int,
        max_num_batched_tokens: int,
        slot_of: Callable[[int], int | None],
        is_staged: Callable[[int], bool],
    ) -> None:
        self._blocks = blocks
        self._max_num_sequences = max_num_sequences
        self._max_num_batched_tokens = max_num_batched_tokens
        self._slot_of = slot_of
        self._is_staged = is_staged
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._places = list(range(max_num_sequences - 1, -1, -1))

    @property
    def num_running(self) -> int:
        """Sequences being generated."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences not admitted yet."""
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence at the end of the queue."""
        self._waiting.append(sequence)

    def uses(self, generation: int) -> bool:
        """Whether any sequence, running or waiting, needs a generation of an adapter."""
        return any(s.request.adapter_generation == generation for s in (*self._running, *self._waiting))

    def plan(self, after: Iterable[Chunk] = ()) -> list[Chunk]:
        """The next step's tokens; empty if there is nothing to do. Drops what was cancelled.

        Args:
            after: chunks of a step that has yet to run; the plan is for the one behind it. Nothing of them is dropped.
                Sequences that get their last token in them, by max_tokens, have none here.
        """
        under_way = {id(chunk.sequence): chunk for chunk in after}
        self._drop_cancelled(under_way)
        self._admit()
        budget = self._max_num_batched_tokens
        chunks: list[Chunk] = []
        left = [(s, *_left(s, under_way.get(id(s)))) for s in self._running]
        for sequence, start, num_left in sorted(left, key=lambda item: (item[2] > 1, item[0].order)):
            length = min(num_left, budget)
            if length > 0:
                chunks.append(Chunk(sequence=sequence, start=start, length=length))
                budget -= length
        return chunks

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence that has ended out, and frees its blocks."""
        self._running.remove(sequence)
        self._release(sequence)

    def fail_all(self, error: EpiloraError) -> None:
        """Ends every sequence with an error."""
        for sequence in (*self._running, *self._waiting):
            if not sequence.ended:
                sequence.outputs.put(error)
            self._release(sequence)
        self._running.clear()
        self._waiting.clear()

    def _drop_cancelled(self, under_way: Container[int]) -> None:
        for sequence in [s for s in self._running if s.cancelled and id(s) not in under_way]:
            self.finish(sequence)
        if any(s.cancelled for s in self._waiting):
            self._waiting = deque(s for s in self._waiting if not s.cancelled)

    def _admit(self) -> None:
        held_back: deque[Sequence] = deque()
        while self._waiting and len(self._running) < self._max_num_sequences:
            sequence = self._waiting.popleft()
            generation = sequence.request.adapter_generation
            if generation and self._slot_of(generation) is None:
                # Another rank may have applied the activation a moment before this one.
                if self._is_staged(generation):
                    held_back.append(sequence)
                else:
                    sequence.outputs.put(_not_resident(sequence))
                continue
            block_table = self._blocks.allocate(sequence.num_positions)
            if block_table is None:
                self._waiting.appendleft(sequence)
                break
            sequence.block_table = block_table
            sequence.place = self._places.pop()
            self._running.append(sequence)
        self._waiting.extendleft(reversed(held_back))

    def _release(self, sequence: Sequence) -> None:
        self._blocks.release(sequence.block_table)
        sequence.block_table = ()
        if sequence.place >= 0:
            self._places.append(sequence.place)
            sequence.place = -1


def _left(sequence: Sequence, under_way: Chunk | None) -> tuple[int, int]:
    """The first position to be computed, and how many follow, once the chunk under way is done; 0 if it ends there."""
    if under_way is None:
        return sequence.num_computed, len(sequence.token_ids) - sequence.num_computed
    start = under_way.start + under_way.length
    if sequence.cancelled or sequence.ended:
        return start, 0
    if not under_way.completes:
        return start, len(sequence.token_ids) - start
    return start, int(sequence.num_generated + 1 < sequence.request.max_tokens)


def _not_resident(sequence: Sequence) -> FailedPreconditionError:
    request = sequence.request
    return FailedPreconditionError(
        f"request {request.request_id} needs adapter generation {request.adapter_generation}, "
        "which is not resident on this rank; load the adapter first",
        reason="ADAPTER_NOT_RESIDENT",
        metadata={"adapter_generation": request.adapter_generation},
    )
