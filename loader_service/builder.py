"""One build for all who ask for the same slices at the same time, and a lease for each of them.

Lives on the event loop; everything that reads or writes files runs in threads.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, TypeVar

from epilora.settings import LoaderSettings
from epilora.v1 import types_pb2
from loader_service.build import AdapterBuilder, TierCounters
from loader_service.cache import BuiltSlices, CacheState, SliceCache
from loader_service.request import BuildRequest
from loader_service.source import SourceIdentity
from loader_service.verify import Verified, verify_cache
from loader_service.writer import BuildProgress

_NUM_BUILD_THREADS = 2
_NUM_FILE_THREADS = 4

Result = TypeVar("Result")


class Builder(Protocol):
    """Makes entries of a cache: `AdapterBuilder`, or `SharedBuilder` where a Redis is behind the cache."""

    @property
    def counters(self) -> TierCounters:
        """What was done with Redis."""

    def identify(self, source: str) -> SourceIdentity:
        """Identity of a source as it is now."""

    def build(
        self, request: BuildRequest, identity: SourceIdentity, progress: BuildProgress, *, lease: str
    ) -> BuiltSlices:
        """The slices of a request, published in the cache."""

    def close(self) -> None:
        """Ends what goes on between builds."""


def _make_builder(settings: LoaderSettings, cache: SliceCache) -> Builder:
    if not settings.cache.get_secret_value():
        return AdapterBuilder(settings, cache)
    from loader_service.shared_build import SharedBuilder  # the client of Redis is there only where it is used

    return SharedBuilder(settings, cache)


@dataclass(slots=True)
class _Flight:
    """A build under way."""

    progress: BuildProgress
    waiting: set[str] = field(default_factory=set)
    """The lease ids of the calls that wait; all become leases at once when the build is done."""
    lease_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """The build's own lease, until then."""
    task: asyncio.Task[BuiltSlices] | None = None


class Ticket:
    """One call's place in a build. Use as an async context manager: without `keep`, its lease is given back."""

    def __init__(self, builds: SliceBuilds, request: BuildRequest) -> None:
        self._builds = builds
        self._request = request
        self._kept = False
        self._flight: _Flight | None = None
        self._built: BuiltSlices | None = None
        self.lease_id = uuid.uuid4().hex
        self.cache_hit = False
        self.pinned_source = ""
        """See SourceIdentity; known once the ticket was entered."""

    async def __aenter__(self) -> Ticket:
        identity, found = await self._builds.enter(self._request, self.lease_id)
        self.pinned_source = identity.pinned_source
        if isinstance(found, BuiltSlices):
            self._built, self.cache_hit = found, True
        else:
            self._flight = found
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._kept:
            self._builds.leave(self._flight, self.lease_id)

    async def wait(self, timeout_seconds: float) -> BuiltSlices | None:
        """The slices; None if they are not there within the timeout. Raises what the build raised."""
        if self._flight is None:
            return self._built
        assert self._flight.task is not None
        done, _ = await asyncio.wait({self._flight.task}, timeout=timeout_seconds)
        return self._flight.task.result() if done else None

    @property
    def progress(self) -> BuildProgress:
        """How far the build is."""
        return self._flight.progress if self._flight is not None else BuildProgress()

    def report(self, built: BuiltSlices) -> types_pb2.AdapterLoadReport:
        """The report as this call gets it: nothing was read for a call that found the slices there."""
        report = types_pb2.AdapterLoadReport()
        report.CopyFrom(built.report)
        if self.cache_hit:
            report.cache_hit, report.bytes_read = True, 0
        return report

    def keep(self) -> None:
        """The caller has the lease id: the lease lives until it is given back."""
        self._kept = True


class SliceBuilds:
    """All builds of a loader."""

    def __init__(self, settings: LoaderSettings, cache: SliceCache) -> None:
        self.instance_id = uuid.uuid4().hex
        self._cache = cache
        self._builder = _make_builder(settings, cache)
        self._flights: dict[str, _Flight] = {}
        self._build_threads = ThreadPoolExecutor(_NUM_BUILD_THREADS, thread_name_prefix="build")
        self._file_threads = ThreadPoolExecutor(_NUM_FILE_THREADS, thread_name_prefix="files")

    def ticket(self, request: BuildRequest) -> Ticket:
        """A place for one call."""
        return Ticket(self, request)

    async def enter(self, request: BuildRequest, lease_id: str) -> tuple[SourceIdentity, BuiltSlices | _Flight]:
        """Leases the entry of a request if it is there, else joins its build, else starts one."""
        identity = await self._in_thread(self._file_threads, lambda: self._builder.identify(request.source))
        entry_id = request.entry_id(identity)
        while True:
            built = self._cache.lease(entry_id, lease_id)
            if built is not None:
                return identity, built
            flight = self._flights.get(entry_id)
            if flight is None:
                flight = self._start(request, identity, entry_id)
            if not flight.progress.is_cancelled:
                flight.waiting.add(lease_id)
                return identity, flight
            # Its last caller has just gone. Wait until it has given its bytes back, then build anew.
            assert flight.task is not None
            await asyncio.wait({flight.task})

    def leave(self, flight: _Flight | None, lease_id: str) -> None:
        """A call ends without having got its lease id: its lease is given back, or its place in the build."""
        if flight is not None:
            flight.waiting.discard(lease_id)
            if not flight.waiting:
                flight.progress.cancel()
        self._file_threads.submit(self._cache.release, lease_id)

    async def release(self, lease_id: str) -> int:
        """Gives a lease back. Returns the bytes removed from the cache."""
        return await self._in_thread(self._file_threads, lambda: self._cache.release(lease_id))

    async def verify(self) -> Verified:
        """Reads back every slice."""
        return await self._in_thread(self._file_threads, lambda: verify_cache(self._cache))

    def state(self) -> CacheState:
        """Numbers of the cache."""
        return self._cache.state()

    def redis_counters(self) -> TierCounters:
        """Numbers of the tier behind it."""
        return self._builder.counters

    async def close(self) -> None:
        """Stops all builds and waits for them."""
        flights = list(self._flights.values())
        for flight in flights:
            flight.progress.cancel()
        tasks = [flight.task for flight in flights if flight.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.to_thread(self._builder.close)
        for threads in (self._build_threads, self._file_threads):
            threads.shutdown()

    def _start(self, request: BuildRequest, identity: SourceIdentity, entry_id: str) -> _Flight:
        flight = _Flight(progress=BuildProgress())
        flight.task = asyncio.create_task(self._fly(flight, request, identity, entry_id))
        # Callers take the error from the task; if all of them have gone, nobody does.
        flight.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._flights[entry_id] = flight
        return flight

    async def _fly(
        self, flight: _Flight, request: BuildRequest, identity: SourceIdentity, entry_id: str
    ) -> BuiltSlices:
        try:
            built = await self._in_thread(
                self._build_threads,
                lambda: self._builder.build(request, identity, flight.progress, lease=flight.lease_id),
            )
            # Back on the loop: from here on, who leaves gives a lease back.
            for lease_id in flight.waiting:
                self._cache.lease(entry_id, lease_id)
            self._file_threads.submit(self._cache.release, flight.lease_id)
            return built
        finally:
            del self._flights[entry_id]

    async def _in_thread(self, threads: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(threads, work)
