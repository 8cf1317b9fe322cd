"""Decides whether this gateway serves: all ranks up, and the registry's adapters restored on them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from epilora.errors import EpiloraError, UnavailableError
from gateway.in_flight import InFlight
from gateway.lifecycle import Lifecycle
from gateway.ranks import RETRY_AFTER_SECONDS, Group
from gateway.rebalance import Rebalancer
from gateway.restore import Restorer
from gateway.stopping import stopping_error

log = structlog.get_logger(__name__)

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0


class Keeper:
    """Reacts to the group: at its loss everything in flight ends at once; when it is back, adapters come back first."""

    def __init__(
        self,
        *,
        group: Group,
        in_flight: InFlight,
        lifecycle: Lifecycle,
        rebalancer: Rebalancer,
        restorer: Restorer,
        publish: Callable[[bool], Awaitable[None]],
    ) -> None:
        self._group = group
        self._in_flight = in_flight
        self._lifecycle = lifecycle
        self._rebalancer = rebalancer
        self._restorer = restorer
        self._publish = publish
        self._wake = asyncio.Event()
        self._stopping = False
        self.serving: str | None = None
        """Incarnation of the group that serves now."""

    def require_serving(self) -> str:
        """The incarnation that serves; UnavailableError if none does."""
        if self._stopping:
            raise stopping_error()
        if self.serving is None:
            raise self._group.not_ready()
        return self.serving

    def stop(self) -> None:
        """Admits nothing more."""
        self._stopping = True

    def wake(self) -> None:
        """Has health published anew."""
        self._wake.set()

    def group_changed(self) -> None:
        """To be called whenever the group's incarnation has changed."""
        if self.serving is not None and self._group.incarnation != self.serving:
            self.serving = None
            problem = self._group.problem() or "they were restarted"
            error = UnavailableError(
                f"the ranks were lost while this call was in flight: {problem}",
                reason="RANK_LOST",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
            num_calls = self._in_flight.end_all(error)
            self._lifecycle.group_lost(error)
            self._rebalancer.cancel(error)
            log.error("group lost", problem=problem, num_calls_ended=num_calls)
        self._wake.set()

    async def run(self) -> None:
        """Follows the group for ever."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._publish(self.serving is not None)
            incarnation = self._group.incarnation
            if incarnation is None or incarnation == self.serving:
                continue
            if await self._bring_up(incarnation):
                pause = FIRST_PAUSE_SECONDS
                continue
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            self._wake.set()

    async def _bring_up(self, incarnation: str) -> bool:
        restoring = asyncio.create_task(self._restorer.restore(incarnation))
        try:
            while not restoring.done():
                changed = asyncio.create_task(self._wake.wait())
                await asyncio.wait({restoring, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                self._wake.clear()
                if self._group.incarnation != incarnation:
                    restoring.cancel()
                    await asyncio.wait({restoring})
        except asyncio.CancelledError:
            restoring.cancel()
            await asyncio.wait({restoring})
            raise
        if restoring.cancelled() or self._group.incarnation != incarnation:
            return False
        error = restoring.exception()
        if error is not None:
            _log_failure(error)
            return False
        self.serving = incarnation
        log.info("group serves", incarnation=incarnation)
        await self._publish(True)
        return True


def _log_failure(error: BaseException) -> None:
    causes = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
    for cause in causes:
        if isinstance(cause, EpiloraError):
            log.warning("adapters not restored yet", reason=cause.reason, why=cause.message)
        else:
            log.error("restoring adapters failed", exc_info=cause)
