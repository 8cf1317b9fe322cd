"""The calls that are being answered: what they use, how to end them from outside, when all have their answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from epilora.errors import EpiloraError


class Ticket:
    """One call in flight on one rank.

    `error` is set when the gateway ended the call itself; whoever serves the call then raises it
    instead of the cancellation that it sees.
    """

    def __init__(self, ep_rank: int) -> None:
        self.ep_rank = ep_rank
        self.error: EpiloraError | None = None
        self._call: Any = None

    def attach(self, call: Any) -> None:
        """Ties the worker's call to this ticket. A ticket that was ended already cancels it at once."""
        self._call = call
        if self.error is not None:
            call.cancel()

    def end(self, error: EpiloraError) -> None:
        """Ends the call with an error, which also frees its place in the worker."""
        if self.error is None:
            self.error = error
            if self._call is not None:
                self._call.cancel()


class InFlight:
    """All tickets of this gateway."""

    def __init__(self) -> None:
        self._tickets: set[Ticket] = set()
        self._per_rank: Counter[int] = Counter()
        self._num_unanswered = 0
        self._num_followers = 0
        self._refusal: EpiloraError | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def ticket(self, ep_rank: int) -> Iterator[Ticket]:
        """A ticket for the duration of one call.

        Raises:
            EpiloraError: what `close` was given, once it was called.
        """
        if self._refusal is not None:
            raise self._refusal
        ticket = Ticket(ep_rank)
        self._tickets.add(ticket)
        self._per_rank[ep_rank] += 1
        self._look()
        try:
            yield ticket
        finally:
            self._tickets.discard(ticket)
            self._per_rank[ep_rank] -= 1
            self._look()

    def until_answered(self, context: Any) -> None:
        """Counts a public call until its status has left: were the server stopped before, its caller would see
        CANCELLED instead.

        Args:
            context: the servicer's.
        """
        self._num_unanswered += 1
        self._look()
        context.add_done_callback(self._answered)

    def _answered(self, _: Any) -> None:
        self._num_unanswered -= 1
        self._look()

    def follows(self, context: Any) -> None:
        """Counts a public call that goes on until `close`: it is waited for only from then on.

        Args:
            context: the servicer's.
        """
        self._num_followers += 1
        context.add_done_callback(self._follower_left)
        self._look()

    def _follower_left(self, _: Any) -> None:
        self._num_followers -= 1
        self._look()

    def _look(self) -> None:
        closed = self._refusal is not None
        if self._tickets or self._num_unanswered or (closed and self._num_followers):
            self._idle.clear()
        else:
            self._idle.set()

    def __len__(self) -> int:
        return len(self._tickets)

    def on_rank(self, ep_rank: int) -> int:
        """Calls in flight on one rank."""
        return self._per_rank[ep_rank]

    def end_all(self, error: EpiloraError) -> int:
        """Ends every call; returns how many there were."""
        tickets = list(self._tickets)
        for ticket in tickets:
            ticket.end(error)
        return len(tickets)

    def close(self, error: EpiloraError) -> None:
        """Ends every call, and each that comes later as soon as it asks for its ticket."""
        self._refusal = error
        self.end_all(error)
        self._look()

    async def idle(self, timeout_seconds: float) -> bool:
        """Waits until nothing is in flight and every call has its status; False if that took too long."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
