"""Takes adapters away: waits for their requests, frees them on every rank, gives their leases back."""

from __future__ import annotations

import asyncio

import structlog

from epilora.errors import EpiloraError, UnavailableError
from gateway.adapter_table import Generation
from gateway.registry import Registry
from gateway.residency import Loader, Residency

log = structlog.get_logger(__name__)

REMOVE_ATTEMPTS = 3
REMOVE_PAUSE_SECONDS = 0.2
ABORTED_CALLS_SECONDS = 5.0
"""How long calls that were ended by a drain may take to let go of their adapter."""


async def drain(generation: Generation, timeout_seconds: float) -> int:
    """Waits for the requests of a generation, then ends those left; how many were ended."""
    try:
        async with asyncio.timeout(timeout_seconds):
            await generation.unused.wait()
        return 0
    except TimeoutError:
        left = list(generation.uses)
    for ticket in left:
        ticket.end(
            UnavailableError(
                f"adapter {generation.name!r}, generation {generation.number}, was taken away, and this request "
                f"had not finished {timeout_seconds:g} s later",
                reason="ADAPTER_DRAINED",
                metadata={"adapter": generation.name, "generation": generation.number},
            )
        )
    try:
        async with asyncio.timeout(ABORTED_CALLS_SECONDS):
            await generation.unused.wait()
    except TimeoutError:
        log.error("calls did not end", adapter=generation.name, num_calls=len(generation.uses))
    return len(left)


class Removal:
    """Of generations that nobody is to use any more.

    Args:
        loader: holds the leases of slices.
        residency: of adapters on the ranks.
        registry: remembers leases that could not be given back.
    """

    def __init__(self, *, loader: Loader, residency: Residency, registry: Registry) -> None:
        self._loader = loader
        self._residency = residency
        self._registry = registry

    async def remove(self, generation: Generation) -> EpiloraError | None:
        """Takes a generation out of every rank, in whatever state it is there, and gives its lease back.

        Returns why that failed, if it did. A group that was lost holds nothing, which is a success;
        what another failure leaves behind is found at the next restore.
        """
        failure = None
        for _ in range(REMOVE_ATTEMPTS):
            failure = await self._remove_once(generation)
            if failure is None:
                break
            log.error("cannot remove an adapter", adapter=generation.name, why=str(failure))
            await asyncio.sleep(REMOVE_PAUSE_SECONDS)
        generation.adapter_slot, generation.resident_bytes = -1, 0
        await self.release(generation.lease_id)
        generation.lease_id = ""
        return failure

    async def _remove_once(self, generation: Generation) -> EpiloraError | None:
        try:
            retired = generation.may_be_active and await self._residency.retire(generation.number)
            if generation.may_be_staged and not retired:
                await self._residency.discard(generation.number)
        except UnavailableError:
            pass
        except EpiloraError as error:
            return error
        generation.may_be_active = generation.may_be_staged = False
        return None

    async def release(self, lease_id: str) -> None:
        """Gives a lease back; if the loader is away, the registry remembers it until the next restore."""
        if not lease_id:
            return
        try:
            await self._loader.release(lease_id)
        except EpiloraError as error:
            log.warning("lease not given back yet", lease_id=lease_id, why=str(error))
            return
        await self._registry.drop_lease(lease_id)
