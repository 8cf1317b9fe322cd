"""What the gateway knows of every adapter: generations, states, who uses them, who watches.

A name has at most one current generation (SERVING or DRAINING) and one that is being loaded.
Get and List show the current one, else the one being loaded, else the last failure; Watch shows
the load under way first, so that a reload can be followed. The failure of a name that was never
served stays visible until the name is loaded or unloaded, or the gateway restarts; only the
newest ones are kept.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from epilora.errors import AbortedError, EpiloraError, FailedPreconditionError, NotFoundError
from epilora.v1 import adapter_service_pb2, types_pb2
from gateway.in_flight import Ticket

MAX_FAILED_NAMES = 256
MAX_UNREAD_OBSERVATIONS = 1024

LOADING = types_pb2.ADAPTER_STATE_LOADING
STAGED = types_pb2.ADAPTER_STATE_STAGED
SERVING = types_pb2.ADAPTER_STATE_SERVING
DRAINING = types_pb2.ADAPTER_STATE_DRAINING
FAILED = types_pb2.ADAPTER_STATE_FAILED
UNLOADED = types_pb2.ADAPTER_STATE_UNLOADED


def state_name(state: int) -> str:
    """ "SERVING" for ADAPTER_STATE_SERVING."""
    return types_pb2.AdapterState.Name(state).removeprefix("ADAPTER_STATE_")


@dataclass(slots=True, eq=False)
class Generation:
    """One load of one name. Changed by the lifecycle only."""

    name: str
    source: str
    allow_partial: bool
    layout_hints: types_pb2.LayoutHints = field(default_factory=types_pb2.LayoutHints)
    number: int = 0
    digest: str = ""
    state: types_pb2.AdapterState = LOADING
    failure: types_pb2.AdapterFailure | None = None
    adapter_slot: int = -1
    serving_since: float | None = None
    resident_bytes: int = 0
    report: types_pb2.AdapterLoadReport | None = None
    lease_id: str = ""
    may_be_staged: bool = False
    """Ranks may hold it."""
    may_be_active: bool = False
    """Ranks may have given it a slot."""
    cut_short: EpiloraError | None = None
    """Why the gateway itself ended the load."""
    bytes_done: int = 0
    bytes_total: int = 0
    uses: Counter[Ticket] = field(default_factory=Counter)
    unused: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.unused.set()

    def use(self, ticket: Ticket) -> None:
        """A call uses this generation, which therefore stays resident; one call may do so several times."""
        self.uses[ticket] += 1
        self.unused.clear()

    def unuse(self, ticket: Ticket) -> None:
        """Takes back one use()."""
        self.uses[ticket] -= 1
        if not self.uses[ticket]:
            del self.uses[ticket]
        if not self.uses:
            self.unused.set()

    def to_proto(self) -> types_pb2.Adapter:
        """The public message."""
        adapter = types_pb2.Adapter(
            name=self.name,
            source=self.source,
            generation=self.number,
            digest=self.digest,
            state=self.state,
            failure=self.failure,
            adapter_slot=self.adapter_slot,
            num_requests_in_flight=len(self.uses),
            resident_bytes=self.resident_bytes,
            report=self.report,
        )
        if self.serving_since is not None:
            adapter.serving_since.FromNanoseconds(int(self.serving_since * 1e9))
        return adapter


class Observations:
    """What one watcher has not read yet. Progress of one load is merged, changes of state are not."""

    def __init__(self) -> None:
        self._unread: deque[adapter_service_pb2.WatchAdapterResponse] = deque(maxlen=MAX_UNREAD_OBSERVATIONS)
        self._arrived = asyncio.Event()
        self._end: EpiloraError | None = None

    def add(self, observation: adapter_service_pb2.WatchAdapterResponse) -> None:
        """Appends, or replaces an unread one of the same generation and state."""
        if self._unread:
            last = self._unread[-1].adapter
            if (last.generation, last.state) == (observation.adapter.generation, observation.adapter.state):
                self._unread.pop()
        self._unread.append(observation)
        self._arrived.set()

    def end(self, error: EpiloraError) -> None:
        """Nothing more is going to be added."""
        self._end = error
        self._arrived.set()

    async def next(self) -> adapter_service_pb2.WatchAdapterResponse:
        """The oldest unread one. When all are read, what `end` was given is raised."""
        while not self._unread:
            if self._end is not None:
                raise self._end
            self._arrived.clear()
            await self._arrived.wait()
        return self._unread.popleft()


@dataclass(slots=True, eq=False)
class Entry:
    """One name."""

    name: str
    current: Generation | None = None
    loading: Generation | None = None
    failed: Generation | None = None
    retiring: set[Generation] = field(default_factory=set)
    busy: str = ""
    watchers: set[Observations] = field(default_factory=set)

    def shown(self) -> Generation | None:
        """What Get and List show."""
        return self.current or self.loading or self.failed


class AdapterTable:
    """All names."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._watches_end: EpiloraError | None = None

    def entries(self) -> list[Entry]:
        """All names in order."""
        return [self._entries[name] for name in sorted(self._entries)]

    def find(self, name: str) -> Entry | None:
        """The entry of a name that has something to show."""
        entry = self._entries.get(name)
        return entry if entry is not None and entry.shown() is not None else None

    def get(self, name: str) -> Generation:
        """What Get shows. NotFoundError if the name is not there."""
        entry = self.find(name)
        shown = entry.shown() if entry is not None else None
        if shown is None:
            raise _not_found(name)
        return shown

    def serving(self, name: str, *, field: str = "adapter_name") -> Generation:
        """The generation that a new request of this name uses.

        Raises:
            NotFoundError: no such adapter.
            FailedPreconditionError: it is not SERVING.
        """
        entry = self.find(name)
        if entry is None:
            raise _not_found(name, field=field)
        if entry.current is not None and entry.current.state == SERVING:
            return entry.current
        shown = entry.shown()
        assert shown is not None
        why = f": {shown.failure.message}" if shown.failure is not None else ""
        raise FailedPreconditionError(
            f"adapter {name!r} is {state_name(shown.state)}, expected SERVING{why}",
            reason="ADAPTER_NOT_SERVING",
            metadata={"adapter": name, "state": state_name(shown.state)},
        )

    @contextmanager
    def claim(self, name: str, purpose: str) -> Iterator[Entry]:
        """Exclusive right to change a name; AbortedError if another change is under way."""
        entry = self._entries.setdefault(name, Entry(name=name))
        if entry.busy:
            article = "an" if entry.busy[0] in "aeiou" else "a"
            raise AbortedError(
                f"{article} {entry.busy} of adapter {name!r} is under way; try the {purpose} again when it has ended",
                reason="ADAPTER_BUSY",
                retry_after_seconds=1.0,
                metadata={"adapter": name, "under_way": entry.busy},
            )
        entry.busy = purpose
        try:
            yield entry
        finally:
            entry.busy = ""
            self._forget_if_empty(entry)

    def _forget_if_empty(self, entry: Entry) -> None:
        if entry.shown() is None and not entry.busy and not entry.retiring:
            self._entries.pop(entry.name, None)

    def changed(self, entry: Entry, generation: Generation) -> None:
        """Tells the watchers of a name about one of its generations."""
        if not entry.watchers:
            return
        observation = _observe(generation)
        for watcher in entry.watchers:
            watcher.add(observation)

    def set_state(self, entry: Entry, generation: Generation, state: types_pb2.AdapterState) -> None:
        """Changes a state and tells the watchers."""
        generation.state = state
        self.changed(entry, generation)

    def begin(self, entry: Entry, generation: Generation) -> None:
        """A load begins."""
        entry.loading = generation
        self.changed(entry, generation)

    def serve(self, entry: Entry, generation: Generation) -> Generation | None:
        """The load is done: later requests use this generation. Returns the one it replaces."""
        old = entry.current
        entry.current, entry.loading, entry.failed = generation, None, None
        generation.serving_since = generation.serving_since or time.time()
        self.set_state(entry, generation, SERVING)
        if old is not None:
            entry.retiring.add(old)
            old.state = DRAINING
        return old

    def fail(self, entry: Entry, generation: Generation, error: EpiloraError) -> None:
        """The load ended with an error; the current generation, if any, is shown again."""
        generation.failure = types_pb2.AdapterFailure(
            code=error.code.value[0], reason=error.reason, message=error.message
        )
        entry.loading = None
        self.set_state(entry, generation, FAILED)
        if entry.current is not None:
            self.changed(entry, entry.current)
            return
        entry.failed = generation
        failed = [other for other in self._entries.values() if other.shown() is other.failed and not other.busy]
        for oldest in failed[: max(0, len(failed) - MAX_FAILED_NAMES)]:
            self.forget(oldest)

    def lost(self, entry: Entry) -> None:
        """The ranks are gone: what served waits to be restored. An unload under way goes on."""
        generation = entry.current
        if generation is None or entry.busy == "unload":
            return
        generation.may_be_staged = generation.may_be_active = False
        generation.adapter_slot, generation.resident_bytes, generation.bytes_done = -1, 0, 0
        entry.current, entry.loading = None, generation
        self.set_state(entry, generation, LOADING)

    def retired(self, entry: Entry, generation: Generation) -> None:
        """A replaced generation is gone."""
        entry.retiring.discard(generation)
        self._forget_if_empty(entry)

    def forget(self, entry: Entry) -> None:
        """The name is gone; its watchers end."""
        last = entry.shown()
        entry.current = entry.loading = entry.failed = None
        if last is not None:
            last.adapter_slot, last.resident_bytes = -1, 0
            self.set_state(entry, last, UNLOADED)
        self._forget_if_empty(entry)

    def end_watches(self, error: EpiloraError) -> None:
        """Ends every watch with an error once what it has not read yet is read, and each that comes later."""
        self._watches_end = error
        for entry in self._entries.values():
            for watcher in entry.watchers:
                watcher.end(error)

    async def watch(self, name: str) -> AsyncGenerator[adapter_service_pb2.WatchAdapterResponse, None]:
        """The state now, then every change, until the adapter is gone or `end_watches`."""
        if self._watches_end is not None:
            raise self._watches_end
        entry = self.find(name)
        if entry is None:
            raise _not_found(name)
        observations = Observations()
        first = entry.loading or entry.shown()
        assert first is not None
        observations.add(_observe(first))
        entry.watchers.add(observations)
        try:
            while True:
                observation = await observations.next()
                yield observation
                if observation.adapter.state == UNLOADED:
                    return
        finally:
            entry.watchers.discard(observations)


def _observe(generation: Generation) -> adapter_service_pb2.WatchAdapterResponse:
    return adapter_service_pb2.WatchAdapterResponse(
        adapter=generation.to_proto(), bytes_done=generation.bytes_done, bytes_total=generation.bytes_total
    )


def _not_found(name: str, *, field: str = "name") -> NotFoundError:
    return NotFoundError(
        f"there is no adapter {name!r}; ListAdapters shows those that are there",
        reason="ADAPTER_NOT_FOUND",
        field=field,
        metadata={"adapter": name},
    )
