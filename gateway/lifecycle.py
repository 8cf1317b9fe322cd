"""Loads, reloads and unloads adapters: all ranks or none. The only writer of adapter state.

One load: BuildSlices for every rank -> StageAdapter on every rank at once -> ActivateAdapter on
ep_rank 0 -> registry -> SERVING. Until activation a failure, a cancellation or a deadline undoes
everything; from activation on the load runs to its end whether or not the caller still waits.
An unload that has begun always runs to its end.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
from google.protobuf import json_format

from epilora.adapters.base_model import base_model_warnings
from epilora.errors import (
    AbortedError,
    DeadlineExceededError,
    EpiloraError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)
from epilora.settings import GatewaySettings
from epilora.v1 import types_pb2
from gateway.adapter_table import DRAINING, STAGED, AdapterTable, Entry, Generation
from gateway.move_gate import MoveGate
from gateway.ranks import RETRY_AFTER_SECONDS, Group
from gateway.registry import Registry, RegistryEntry
from gateway.removal import Removal, drain
from gateway.residency import Loader, Residency, build_request, distinct
from gateway.stopping import stopping_error

log = structlog.get_logger(__name__)

T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_name(name: str) -> None:
    """InvalidArgumentError unless it is a legal adapter name."""
    if not _NAME.fullmatch(name):
        raise InvalidArgumentError(
            f"name is {name[:200]!r}, expected 1 to 128 characters of [A-Za-z0-9._-], "
            "starting with a letter or a digit",
            reason="BAD_ADAPTER_NAME",
            field="name",
        )


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Runs work to its end even if the task that waits for it is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            continue
        except BaseException:
            break
    return task.result()


@dataclass(frozen=True, slots=True)
class _Load:
    """A load under way."""

    generation: Generation
    cut: asyncio.Future[None]
    """Done when the gateway itself ends it: its caller need not wait until it has undone what it did."""


class Lifecycle:
    """Every change of an adapter goes through here."""

    def __init__(
        self,
        *,
        settings: GatewaySettings,
        group: Group,
        loader: Loader,
        residency: Residency,
        registry: Registry,
        table: AdapterTable,
        gate: MoveGate,
    ) -> None:
        self._gate = gate
        self._settings = settings
        self._group = group
        self._loader = loader
        self._residency = residency
        self.removal = Removal(loader=loader, residency=residency, registry=registry)
        self._registry = registry
        self._table = table
        self._loads: dict[asyncio.Task[None], _Load] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._stopping = False

    async def load(
        self,
        name: str,
        source: str,
        *,
        allow_partial: bool,
        incarnation: str | None,
        layout_hints: types_pb2.LayoutHints | None = None,
    ) -> types_pb2.Adapter:
        """Loads or reloads a name.

        Args:
            layout_hints: what the caller knows where the file is ambiguous; checked by the loader.
            incarnation: of the group as it serves now; None if it does not serve.

        Raises:
            EpiloraError: see AdapterService.LoadAdapter.
        """
        check_name(name)
        if not source:
            raise InvalidArgumentError("source is empty, expected a directory", reason="NO_SOURCE", field="source")
        if self._stopping:
            raise stopping_error()
        if incarnation is None:
            raise self._group.not_ready()
        generation = Generation(
            name=name,
            source=source,
            allow_partial=allow_partial,
            layout_hints=layout_hints or types_pb2.LayoutHints(),
        )
        with ExitStack() as stack:
            entry = stack.enter_context(self._table.claim(name, "load"))
            task = asyncio.create_task(self._load(entry, generation, incarnation))
            # The name is claimed until the load has undone what it did, which may take longer than its caller waits.
            claim = stack.pop_all()
        cut = asyncio.get_running_loop().create_future()
        self._loads[task] = _Load(generation, cut)
        task.add_done_callback(lambda _: claim.close())
        task.add_done_callback(self._loads.pop)
        try:
            await asyncio.wait({task, cut}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            await to_the_end(_ended(task))
            raise
        if not task.done():
            task.add_done_callback(_take_outcome)
            raise self._cancelled(generation)
        if task.cancelled():
            raise self._cancelled(generation)
        task.result()
        return generation.to_proto()

    async def _load(self, entry: Entry, generation: Generation, incarnation: str) -> None:
        try:
            generation.number = await self._registry.next_generation(at_least=self._largest_resident() + 1)
            self._table.begin(entry, generation)
            await self.make_resident(entry, generation, incarnation)
        except BaseException as error:
            failure = self._failure(generation, error)
            self._table.fail(entry, generation, failure)
            log.warning("load failed", adapter=generation.name, reason=failure.reason, why=failure.message)
            raise
        log.info("adapter serves", adapter=generation.name, generation=generation.number, source=generation.source)

    def _largest_resident(self) -> int:
        infos = [rank.info for rank in self._group.ranks if rank.info is not None]
        return max((adapter.generation for info in infos for adapter in info.memory.adapters), default=0)

    def _failure(self, generation: Generation, error: BaseException) -> EpiloraError:
        if isinstance(error, EpiloraError):
            return error
        if isinstance(error, asyncio.CancelledError):
            return self._cancelled(generation)
        return InternalError(f"{type(error).__name__}; the gateway's log has the details", reason="INTERNAL")

    def _cancelled(self, generation: Generation) -> EpiloraError:
        if generation.cut_short is not None:
            return generation.cut_short
        message = f"the load of adapter {generation.name!r} was cancelled by its caller; nothing of it stays"
        return AbortedError(message, reason="LOAD_CANCELLED")

    async def make_resident(self, entry: Entry, generation: Generation, incarnation: str) -> None:
        """Builds, stages, activates and registers a generation, or leaves nothing of it."""
        async with self._gate.load():
            await self._make_resident(entry, generation, incarnation)

    async def _make_resident(self, entry: Entry, generation: Generation, incarnation: str) -> None:
        try:
            try:
                async with asyncio.timeout(self._settings.load_timeout_seconds):
                    await self._prepare(entry, generation, incarnation)
            except TimeoutError as error:
                raise DeadlineExceededError(
                    f"adapter {generation.name!r} was not loaded within {self._settings.load_timeout_seconds:g} s "
                    f"({generation.bytes_done} of {generation.bytes_total} bytes done); nothing of it stays",
                    reason="LOAD_TIMEOUT",
                ) from error
            await to_the_end(self._commit(entry, generation, incarnation))
        except BaseException:
            await to_the_end(self.removal.remove(generation))
            raise

    async def _prepare(self, entry: Entry, generation: Generation, incarnation: str) -> None:
        try:
            await self._build_and_stage(entry, generation)
        except FailedPreconditionError as error:
            if error.reason != "STALE_PLACEMENT":
                raise
            log.info("placement changed during a load, building again", adapter=generation.name)
            await to_the_end(self.removal.remove(generation))
            await self._group.refresh()
            await self._build_and_stage(entry, generation)
        self._check_same(incarnation)

    async def _build_and_stage(self, entry: Entry, generation: Generation) -> None:
        infos = self._group.infos()
        request = build_request(generation, distinct([info.load_spec for info in infos]), infos[0])

        def built(done: int, total: int) -> None:
            # Half of the work is to build the slices, the other half to copy them to the ranks.
            generation.bytes_done, generation.bytes_total = done, 2 * total
            self._table.changed(entry, generation)

        result = await self._loader.build(request, built)
        generation.lease_id, generation.report = result.lease_id, result.report
        generation.source = result.pinned_source or generation.source
        generation.report.warnings.extend(base_model_warnings(result.report.base_model, infos[0].model.name))
        await self._registry.add_lease(result.lease_id)
        await self._number_content(generation, result.adapter_digest)
        total = sum(piece.tensor_bytes for piece in result.slices)
        built(total, total)

        def staged(num_bytes: int) -> None:
            generation.bytes_done += num_bytes
            self._table.changed(entry, generation)

        generation.may_be_staged = True
        generation.resident_bytes = await self._residency.stage(
            generation.name, generation.number, list(result.slices), staged
        )
        self._table.set_state(entry, generation, STAGED)

    async def _number_content(self, generation: Generation, digest: str) -> None:
        if generation.digest and digest != generation.digest:
            # A restored name whose files were changed meanwhile: other content is another generation.
            generation.number = await self._registry.next_generation()
            warning = f"restored from {generation.source}, whose content has changed since it was loaded"
            assert generation.report is not None
            generation.report.warnings.append(warning)
            log.warning("content changed", adapter=generation.name, generation=generation.number, was=generation.digest)
        generation.digest = digest

    def _check_same(self, incarnation: str) -> None:
        if self._group.incarnation != incarnation:
            raise UnavailableError(
                f"the ranks were restarted during the load ({self._group.problem() or 'they are back'}); try again",
                reason="GROUP_RESTARTED",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )

    async def _commit(self, entry: Entry, generation: Generation, incarnation: str) -> None:
        generation.may_be_active = True
        generation.adapter_slot = await self._residency.activate(generation.number)
        generation.serving_since = generation.serving_since or time.time()
        assert generation.report is not None
        await self._registry.put(
            RegistryEntry(
                name=generation.name,
                source=generation.source,
                allow_partial=generation.allow_partial,
                layout_hints=json_format.MessageToDict(generation.layout_hints),
                generation=generation.number,
                digest=generation.digest,
                lease_id=generation.lease_id,
                serving_since=generation.serving_since,
                report=json_format.MessageToDict(generation.report),
            )
        )
        old = self._table.serve(entry, generation)
        if old is not None:
            self._in_background(self._retire_replaced(entry, old))

    async def _retire_replaced(self, entry: Entry, old: Generation) -> None:
        try:
            await drain(old, self._settings.drain_timeout_seconds)
            await self.removal.remove(old)
        finally:
            self._table.retired(entry, old)

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(_log_failure)

    async def unload(self, name: str, drain_timeout_seconds: float | None) -> tuple[int, int]:
        """Drains an adapter, frees it and forgets the name; bytes freed and requests cancelled.

        Raises:
            NotFoundError: no such adapter.
            AbortedError: the name is being loaded or unloaded.
        """
        self._table.get(name)
        timeout = self._settings.drain_timeout_seconds if drain_timeout_seconds is None else drain_timeout_seconds
        with self._table.claim(name, "unload") as entry:
            return await to_the_end(self._unload(entry, timeout))

    async def _unload(self, entry: Entry, timeout: float) -> tuple[int, int]:
        generation, freed, cancelled, failure = entry.current, 0, 0, None
        if generation is not None:
            self._table.set_state(entry, generation, DRAINING)
            cancelled = await drain(generation, timeout)
        registered = self._registry.get(entry.name)
        await self._registry.remove(entry.name)
        if generation is not None:
            freed = generation.resident_bytes
            failure = await self.removal.remove(generation)
        elif registered is not None:
            # It waits to be restored. Ranks that outlived the gateway which loaded it may hold it.
            held = Generation(
                name=entry.name, source=registered.source, allow_partial=registered.allow_partial,
                number=registered.generation, lease_id=registered.lease_id, may_be_staged=True, may_be_active=True,
            )  # fmt: skip
            failure = await self.removal.remove(held)
        self._table.forget(entry)
        if failure is not None:
            raise InternalError(
                f"adapter {entry.name!r} is forgotten, but not all ranks freed its memory: {failure.message}",
                reason="ADAPTER_NOT_FREED",
            )
        log.info("adapter unloaded", adapter=entry.name, freed_bytes=freed, num_requests_cancelled=cancelled)
        return freed, cancelled

    def group_lost(self, error: UnavailableError) -> None:
        """Nothing is resident any more: loads under way end, adapters that served wait to be restored."""
        self.cancel_loads(error)
        for entry in self._table.entries():
            self._table.lost(entry)

    def cancel_loads(self, error: EpiloraError) -> list[asyncio.Task[None]]:
        """Ends the loads under way, which undo themselves and fail with `error`."""
        for task, load in self._loads.items():
            load.generation.cut_short = error
            task.cancel()
            if not load.cut.done():
                load.cut.set_result(None)
        return list(self._loads)

    async def loads_ended(self) -> None:
        """Waits for the loads under way."""
        if self._loads:
            await asyncio.wait(list(self._loads))

    async def stop(self) -> None:
        """Refuses further loads and undoes those under way; resident adapters stay in the ranks."""
        self._stopping = True
        self.cancel_loads(stopping_error())
        await self.loads_ended()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)


async def _ended(task: asyncio.Task[None]) -> None:
    await asyncio.wait([task])
    _take_outcome(task)


def _take_outcome(task: asyncio.Task[None]) -> None:
    """Nobody else is going to ask for it."""
    if not task.cancelled():
        task.exception()


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("background work failed", exc_info=task.exception())
