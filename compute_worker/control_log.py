"""The numbered log of changes of adapters and placement that all ranks apply at the same step.

ep_rank 0 numbers the entries and announces them in its step message. Each rank says in its own
message up to which entry it can apply (the adapter is staged; no request needs the retired one; the move is prepared).
All ranks see all messages, so each computes the same "apply up to", and the flip happens at the
same step everywhere. An entry that some rank refuses is dropped by all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from epilora.errors import EpiloraError, FailedPreconditionError, ResourceExhaustedError


class Operation(IntEnum):
    """What an entry does."""

    ACTIVATE = 1
    RETIRE = 2
    PLACE = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One change: make a staged generation visible in a slot, take it away, or take up a prepared move.

    For PLACE, generation is the number of the move, and adapter_slot -1.
    """

    number: int
    operation: Operation
    generation: int
    adapter_slot: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """Where and when an entry took effect."""

    adapter_slot: int
    step: int


class Moves(Protocol):
    """What the log asks of moves to another placement; see PlacementMover."""

    def promise(self, number: int) -> bool:
        """Whether this rank can take the move up at the next step."""
        ...

    def withdraw(self, number: int) -> None:
        """The move is not taken up."""
        ...

    def place(self, number: int) -> None:
        """Takes the move up."""
        ...


class ControlLog:
    """A rank's copy of the log. Used by the step thread only, except `Future`s that it completes.

    Args:
        num_slots: adapter slots.
        is_staged: whether a generation is resident on this rank.
        in_use: whether a request on this rank needs a generation.
        activate: makes a generation visible in a slot.
        retire: frees a generation.
        moves: to another placement.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        is_staged: Callable[[int], bool],
        in_use: Callable[[int], bool],
        activate: Callable[[int, int], None],
        retire: Callable[[int], None],
        moves: Moves,
    ) -> None:
        self._num_slots = num_slots
        self._is_staged = is_staged
        self._in_use = in_use
        self._activate = activate
        self._retire = retire
        self._moves = moves
        self._slot_of: dict[int, int] = {}
        self._pending: list[Entry] = []
        self._last_known = 0
        # Leader only.
        self._unannounced: list[Entry] = []
        self._last_number = 0
        self._futures: dict[int, Future[Applied]] = {}
        self._applied: list[tuple[Future[Applied], Applied]] = []

    def slot_of(self, generation: int) -> int | None:
        """Slot of an active generation."""
        return self._slot_of.get(generation)

    def slot_in_use(self, generation: int) -> int:
        """Slot of a generation that a request holds, so that it is active; -1 for 0, the base model."""
        if not generation:
            return -1
        slot = self._slot_of.get(generation)
        assert slot is not None, f"generation {generation} was retired while in use"
        return slot

    # Leader: adding entries.

    def submit_activate(self, generation: int, future: Future[Applied]) -> None:
        """Numbers an activation; the future completes once every rank applies it."""
        active = self._slot_of.get(generation)
        if active is not None:
            future.set_result(Applied(adapter_slot=active, step=0))
            return
        taken = set(self._slot_of.values()) | {entry.adapter_slot for entry in (*self._pending, *self._unannounced)}
        free = next((slot for slot in range(self._num_slots) if slot not in taken), None)
        if free is None:
            future.set_exception(
                ResourceExhaustedError(
                    f"all {self._num_slots} adapter slots are taken; unload an adapter, or raise num_adapter_slots (a "
                    "reload needs a free slot, too: the generation before serves on until the new one does)",
                    reason="NO_ADAPTER_SLOT",
                    metadata={"num_adapter_slots": self._num_slots},
                )
            )
            return
        self._number(Operation.ACTIVATE, generation, free, future)

    def submit_retire(self, generation: int, future: Future[Applied]) -> None:
        """Numbers a retirement; the future completes once every rank has freed it, at step 0 if it was not active."""
        # An activation under way counts: a caller that gave up on it must be able to undo it.
        activations = [e for e in self._outstanding() if e.operation is Operation.ACTIVATE]
        slot = next((e.adapter_slot for e in activations if e.generation == generation), self._slot_of.get(generation))
        if slot is None:
            future.set_result(Applied(adapter_slot=-1, step=0))
            return
        if any(e.generation == generation and e.operation is Operation.RETIRE for e in self._outstanding()):
            future.set_exception(
                FailedPreconditionError(f"generation {generation} is being retired", reason="ADAPTER_RETIRING")
            )
            return
        self._number(Operation.RETIRE, generation, slot, future)

    def submit_place(self, number: int, future: Future[Applied]) -> None:
        """Numbers a move to another placement; the future completes once every rank has taken it up."""
        self._number(Operation.PLACE, number, -1, future)

    # Every rank: one step.

    def next_announcement(self) -> Entry | None:
        """Leader: the entry for this step's message."""
        return self._unannounced[0] if self._unannounced else None

    def acknowledged(self) -> int:
        """Number of the last entry up to which this rank can apply all."""
        last = self._last_known - len(self._pending)
        for entry in self._pending:
            if not self._ready(entry):
                break
            last = entry.number
        return last

    def refused(self) -> int:
        """Number of the next entry if this rank can never apply it, else 0."""
        if not self._pending:
            return 0
        entry = self._pending[0]
        impossible = entry.operation is not Operation.RETIRE and not self._ready(entry)
        return entry.number if impossible else 0

    def advance(
        self, *, step: int, announced: Entry | None, acknowledged: Sequence[int], refused: Sequence[int]
    ) -> bool:
        """Applies what all ranks agree on, then notes what was announced. The same on every rank.

        Args:
            step: number of this step.
            announced: entry in the leader's message.
            acknowledged: each rank's `acknowledged()`.
            refused: each rank's `refused()`.

        Returns:
            True if something is outstanding, so that another step is wanted soon.
        """
        # All ranks have sent this step's messages, so all have applied what was agreed at the step before.
        for future, applied in self._applied:
            future.set_result(applied)
        self._applied.clear()
        agreed = min(acknowledged)
        while self._pending and self._pending[0].number <= agreed:
            self._apply(self._pending.pop(0), step)
        if self._pending and self._pending[0].number in refused:
            dropped = self._pending.pop(0)
            if dropped.operation is Operation.PLACE:
                self._moves.withdraw(dropped.generation)
            refusing = [rank for rank, number in enumerate(refused) if number == dropped.number]
            waiting = self._futures.pop(dropped.number, None)
            if waiting is not None:
                waiting.set_exception(_refusal(dropped, refusing))
        if announced is not None and announced.number > self._last_known:
            self._pending.append(announced)
            self._last_known = announced.number
            if self._unannounced and self._unannounced[0].number == announced.number:
                self._unannounced.pop(0)
        if len(acknowledged) == 1:
            self._advance_alone(step)
        return bool(self._outstanding() or self._applied)

    def _advance_alone(self, step: int) -> None:
        """A group of one rank agrees with itself: what was announced at this step need not wait for the next two.

        A move does: this step's plan was made before it.
        """
        while self._pending and self._pending[0].operation is not Operation.PLACE and self._ready(self._pending[0]):
            self._apply(self._pending.pop(0), step)
        for future, applied in self._applied:
            future.set_result(applied)
        self._applied.clear()

    def fail_all(self, error: EpiloraError) -> None:
        """Ends all waits, when the loop ends."""
        for future in [*self._futures.values(), *(future for future, _ in self._applied)]:
            future.set_exception(error)
        self._futures.clear()
        self._applied.clear()

    def _number(self, operation: Operation, generation: int, slot: int, future: Future[Applied]) -> None:
        self._last_number += 1
        entry = Entry(number=self._last_number, operation=operation, generation=generation, adapter_slot=slot)
        self._unannounced.append(entry)
        self._futures[entry.number] = future

    def _outstanding(self) -> list[Entry]:
        return [*self._pending, *self._unannounced]

    def _ready(self, entry: Entry) -> bool:
        if entry.operation is Operation.ACTIVATE:
            return self._is_staged(entry.generation)
        if entry.operation is Operation.PLACE:
            return self._moves.promise(entry.generation)
        return not self._in_use(entry.generation)

    def _apply(self, entry: Entry, step: int) -> None:
        if entry.operation is Operation.ACTIVATE:
            self._activate(entry.generation, entry.adapter_slot)
            self._slot_of[entry.generation] = entry.adapter_slot
        elif entry.operation is Operation.PLACE:
            self._moves.place(entry.generation)
        else:
            self._retire(entry.generation)
            self._slot_of.pop(entry.generation, None)
        future = self._futures.pop(entry.number, None)
        if future is not None:
            self._applied.append((future, Applied(adapter_slot=entry.adapter_slot, step=step)))


def _refusal(entry: Entry, ranks: list[int]) -> FailedPreconditionError:
    if entry.operation is Operation.PLACE:
        return FailedPreconditionError(
            f"move {entry.generation} is not prepared on ranks {ranks}, or not all of their adapters are; prepare it on"
            " every rank first",
            reason="PLACEMENT_NOT_PREPARED",
            metadata={"ranks": ranks},
        )
    return FailedPreconditionError(
        f"adapter generation {entry.generation} is not staged on ranks {ranks}; stage it on every rank first",
        reason="ADAPTER_NOT_STAGED",
        metadata={"adapter_generation": entry.generation, "ranks": ranks},
    )
