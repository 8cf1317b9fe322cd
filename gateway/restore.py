"""Brings ranks and registry together again, after the ranks, the gateway or the whole service was restarted.

What the registry names and every rank holds goes on serving. What the registry names and a rank
lacks is loaded again. What a rank holds and the registry does not name is taken away.
"""

from __future__ import annotations

import asyncio

import structlog
from google.protobuf import json_format

from epilora.errors import AbortedError, EpiloraError, UnavailableError
from epilora.v1 import cluster_service_pb2, types_pb2
from gateway.adapter_table import AdapterTable, Generation
from gateway.lifecycle import Lifecycle
from gateway.ranks import Group
from gateway.rebalance import Rebalancer
from gateway.registry import Registry, RegistryEntry

log = structlog.get_logger(__name__)

NUM_CONCURRENT_LOADS = 4

Residents = list[dict[int, cluster_service_pb2.ResidentAdapter]]
"""Per rank: what it holds, by generation."""


class Restorer:
    """Runs once whenever the group has come up."""

    def __init__(
        self, *, group: Group, registry: Registry, table: AdapterTable, lifecycle: Lifecycle, rebalancer: Rebalancer
    ) -> None:
        self._rebalancer = rebalancer
        self._group = group
        self._registry = registry
        self._table = table
        self._lifecycle = lifecycle

    def announce(self) -> None:
        """Shows what the registry names as LOADING, from before any rank has answered: it is going to be restored."""
        for registered in self._registry.entries():
            with self._table.claim(registered.name, "restore") as entry:
                self._table.begin(entry, from_registry(registered))

    async def restore(self, incarnation: str) -> None:
        """Makes every adapter of the registry serve, or FAILED where its files are at fault.

        Raises:
            UnavailableError: a rank or the loader is away; to be tried again.
        """
        await self._lifecycle.loads_ended()
        await self._rebalancer.ended()
        await self._rebalancer.abandon()
        await self._group.refresh()
        residents: Residents = [
            {adapter.generation: adapter for adapter in info.memory.adapters} for info in self._group.infos()
        ]
        await self._remove_unknown(residents)
        slots = asyncio.Semaphore(NUM_CONCURRENT_LOADS)
        async with asyncio.TaskGroup() as tasks:
            for entry in self._registry.entries():
                tasks.create_task(self._restore_one(entry, residents, incarnation, slots))
        for lease_id in self._registry.stray_leases():
            await self._lifecycle.removal.release(lease_id)

    async def _remove_unknown(self, residents: Residents) -> None:
        known = {entry.generation for entry in self._registry.entries()}
        for entry in self._table.entries():
            known |= {generation.number for generation in entry.retiring}
            known |= {entry.current.number} if entry.current is not None else set()
        for number in sorted({number for held in residents for number in held} - known):
            log.info("taking away an adapter that the registry does not name", generation=number)
            await self._lifecycle.removal.remove(_as_held("", number))

    async def _restore_one(
        self, registered: RegistryEntry, residents: Residents, incarnation: str, slots: asyncio.Semaphore
    ) -> None:
        try:
            with self._table.claim(registered.name, "restore") as entry:
                if self._registry.get(registered.name) != registered:
                    return
                generation = from_registry(registered)
                entry.current = None
                self._table.begin(entry, generation)
                if _adopt(generation, residents):
                    generation.lease_id = registered.lease_id
                    self._table.serve(entry, generation)
                    log.info("adapter still serves", adapter=registered.name, generation=generation.number)
                    return
                async with slots:
                    if any(registered.generation in held for held in residents):
                        await self._lifecycle.removal.remove(_as_held(registered.name, registered.generation))
                    try:
                        await self._lifecycle.make_resident(entry, generation, incarnation)
                        log.info("adapter restored", adapter=registered.name, generation=generation.number)
                    except UnavailableError:
                        raise
                    except EpiloraError as error:
                        # It must not keep the others from serving; the registry keeps it for the next restore.
                        self._table.fail(entry, generation, error)
                        log.error("adapter not restored", adapter=registered.name, reason=error.reason, why=str(error))
        except AbortedError:
            log.info("not restored, since it is being unloaded", adapter=registered.name)


def from_registry(entry: RegistryEntry) -> Generation:
    """The generation that an entry names, before anything is known of where it is."""
    return Generation(
        name=entry.name,
        source=entry.source,
        allow_partial=entry.allow_partial,
        layout_hints=json_format.ParseDict(entry.layout_hints, types_pb2.LayoutHints(), ignore_unknown_fields=True),
        number=entry.generation,
        digest=entry.digest,
        serving_since=entry.serving_since,
        report=json_format.ParseDict(entry.report, types_pb2.AdapterLoadReport(), ignore_unknown_fields=True),
    )


def _as_held(name: str, number: int) -> Generation:
    return Generation(name=name, source="", allow_partial=False, number=number, may_be_staged=True, may_be_active=True)


def _adopt(generation: Generation, residents: Residents) -> bool:
    """Takes over what the ranks hold if all of them hold it in one slot."""
    held = [rank.get(generation.number) for rank in residents]
    slots = {adapter.adapter_slot if adapter is not None else -1 for adapter in held}
    if len(slots) != 1 or -1 in slots:
        return False
    generation.may_be_staged = generation.may_be_active = True
    generation.adapter_slot = slots.pop()
    generation.resident_bytes = sum(a.expert_bytes + a.dense_bytes for a in held if a is not None)
    return True
