"""The slice cache: entries of slice files in shared memory, with a byte budget and leases.

An entry is the slices of one adapter for some ranks. When its last lease is given back it is idle: removed, unless idle
entries may be kept. Of those the first to go is the one that is cheapest to build again for its size, and was not used
for long; a pinned one never goes. The table is in this process: a loader that starts anew starts with an empty cache.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from epilora.errors import ResourceExhaustedError
from epilora.v1 import loader_service_pb2, types_pb2
from loader_service.slice_store import SliceStore

_LET_GO_SECONDS = 5.0
"""For workers to let go of files whose names are gone, which they do within a second, while a build needs the room."""
_LOOK_SECONDS = 0.02

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltSlices:
    """What one build made."""

    adapter_digest: str
    slices: tuple[loader_service_pb2.Slice, ...]
    """In the order of the load specs."""
    report: types_pb2.AdapterLoadReport

    @property
    def paths(self) -> list[Path]:
        """Of the slices."""
        return [Path(piece.path) for piece in self.slices]


@dataclass(slots=True)
class _Entry:
    built: BuiltSlices
    size_bytes: int
    seconds: float
    """That its build took."""
    is_pinned: bool
    leases: set[str] = field(default_factory=set)
    priority: float = 0.0
    """Of an idle entry: the lowest goes first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheState:
    """Numbers of the cache."""

    num_entries: int
    used_bytes: int
    budget_bytes: int
    num_builds: int
    num_leases: int


class Room:
    """Where one entry is written: a directory, and bytes of the budget reserved for it. See `SliceCache.room`."""

    def __init__(self, cache: SliceCache, size_bytes: int) -> None:
        self._cache = cache
        self.size_bytes = size_bytes
        """Reserved."""
        self.directory = Path()
        self._start = time.monotonic()

    def resize(self, size_bytes: int) -> None:
        """Reserves what the entry turned out to need. Raises what `SliceCache.build` raises."""
        if size_bytes > self.size_bytes:
            self._cache.reserve(size_bytes, held_bytes=self.size_bytes)
            self.size_bytes = size_bytes

    def publish(
        self,
        entry_id: str,
        write: Callable[[Path], BuiltSlices],
        *,
        lease: str,
        is_pinned: bool = False,
        is_pulled: bool = False,
    ) -> BuiltSlices:
        """Has the entry written and makes it visible; see `SliceCache.build`."""
        built = self._cache.publish(write(self.directory))
        seconds = time.monotonic() - self._start
        size_bytes = sum(piece.size_bytes for piece in built.slices)
        entry = _Entry(built=built, size_bytes=size_bytes, seconds=seconds, is_pinned=is_pinned)
        self._cache.add(entry_id, entry, lease=lease, is_pulled=is_pulled)
        return built


class SliceCache:
    """Thread-safe. `open` it before use."""

    def __init__(self, directory: Path, budget_bytes: int, *, idle_bytes: int = 0) -> None:
        """Args:
        directory: in shared memory, this loader's own.
        budget_bytes: that all entries may take.
        idle_bytes: that entries without leases may take of it, pinned ones not counted; 0: they are removed.
        """
        self._store = SliceStore(directory)
        self._budget_bytes = budget_bytes
        self._idle_bytes = idle_bytes
        self._clock = 0.0
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._entry_of_lease: dict[str, str] = {}
        self._reserved_bytes = 0
        """Of builds under way."""
        self._num_builds = 0

    def open(self) -> None:
        """Takes the directory and removes what a dead loader left in it. Raises what `SliceStore.open` raises."""
        self._store.open()

    def close(self) -> None:
        """Removes all entries and lets the directory go."""
        with self._lock:
            self._entries.clear()
            self._entry_of_lease.clear()
        self._store.close()

    def build(
        self,
        entry_id: str,
        size_bytes: int,
        write: Callable[[Path], BuiltSlices],
        *,
        lease: str,
        is_pinned: bool = False,
        is_pulled: bool = False,
    ) -> BuiltSlices:
        """Makes an entry: reserves its bytes, has it written, and publishes it. All or nothing.

        Args:
            entry_id: 32 hex digits.
            size_bytes: of all its files.
            write: writes the files into the directory it is given, and says where they are.
            lease: the builder's, so that the entry stays until those who wait for it have theirs.
            is_pinned: the entry stays when it is idle.
            is_pulled: `write` takes the slices from somewhere else; it does not count as a build.

        Returns:
            What `write` returned, with the paths that the files have in the cache.

        Raises:
            ResourceExhaustedError: reason CACHE_FULL; over the budget, or no room in the filesystem.
        """
        with self.room() as room:
            room.resize(size_bytes)
            return room.publish(entry_id, write, lease=lease, is_pinned=is_pinned, is_pulled=is_pulled)

    @contextmanager
    def room(self, expected_bytes: int = 0) -> Iterator[Room]:
        """A place to write an entry in; what is not published is removed when the block ends.

        Args:
            expected_bytes: reserved at once if they are free, without removing anything for them.
        """
        with self._lock:
            is_free = self._taken_bytes() + expected_bytes <= self._budget_bytes
            if not is_free or expected_bytes > self._store.free_bytes():
                expected_bytes = 0
            self._reserved_bytes += expected_bytes
        room = Room(self, expected_bytes)
        try:
            room.directory = self._store.make_unfinished()
            yield room
        finally:
            self._store.discard(room.directory)
            with self._lock:
                self._reserved_bytes -= room.size_bytes

    def add(self, entry_id: str, entry: _Entry, *, lease: str, is_pulled: bool) -> None:
        """Makes what was published an entry: for Room."""
        with self._lock:
            self._entries[entry_id] = entry
            self._num_builds += not is_pulled
            self._add_lease(entry_id, lease)

    def lease(self, entry_id: str, lease: str) -> BuiltSlices | None:
        """Adds a lease to an entry; None if there is no such entry."""
        with self._lock:
            entry = self._entries.get(entry_id)
            if entry is None:
                return None
            if all(path.exists() for path in entry.built.paths):
                self._add_lease(entry_id, lease)
                return entry.built
            log.error("an entry's files were removed by something else", entry=entry_id)
            self._forget(entry_id)
        self._store.release(entry.built.paths)
        return None

    def release(self, lease: str) -> int:
        """Gives a lease back; with the last one, its entry is idle. Returns the bytes removed. Idempotent."""
        with self._lock:
            entry_id = self._entry_of_lease.pop(lease, None)
            if entry_id is None:
                return 0
            entry = self._entries[entry_id]
            entry.leases.discard(lease)
            if entry.leases:
                return 0
            # GreedyDual: the clock is the priority of the last entry that went, so that what is not used ages.
            entry.priority = self._clock + entry.seconds / entry.size_bytes
            idle = sum(other.size_bytes for other in self._entries.values() if _may_go(other))
            evicted = self._evict(idle - self._idle_bytes)
        return self._store.release(evicted)

    def state(self) -> CacheState:
        """Numbers now."""
        # Also the moment to look for files that a worker read when their entry went: the gateway asks all the time.
        self._store.sweep()
        with self._lock:
            return CacheState(
                num_entries=len(self._entries),
                used_bytes=self._taken_bytes(),
                budget_bytes=self._budget_bytes,
                num_builds=self._num_builds,
                num_leases=len(self._entry_of_lease),
            )

    def built(self) -> list[tuple[str, BuiltSlices]]:
        """All entries, by entry_id."""
        with self._lock:
            return [(entry_id, entry.built) for entry_id, entry in sorted(self._entries.items())]

    def drop(self, entry_id: str, built: BuiltSlices) -> bool:
        """Takes an entry away, whoever has leases on it; later calls build it anew. False if it was gone already."""
        with self._lock:
            entry = self._entries.get(entry_id)
            if entry is None or entry.built is not built:
                return False
            self._forget(entry_id)
        self._store.release(built.paths)
        return True

    def publish(self, built: BuiltSlices) -> BuiltSlices:
        """Moves files into the store: for Room."""
        published: list[Path] = []
        try:
            for piece in built.slices:
                published.append(self._store.add(Path(piece.path), piece.digest))
        except BaseException:
            self._store.release(published)
            raise
        return dataclasses.replace(built, slices=_at(built.slices, published))

    def _add_lease(self, entry_id: str, lease: str) -> None:
        self._entries[entry_id].leases.add(lease)
        self._entry_of_lease[lease] = entry_id

    def _forget(self, entry_id: str) -> None:
        for lease in self._entries.pop(entry_id).leases:
            del self._entry_of_lease[lease]

    def _evict(self, num_bytes: int) -> list[Path]:
        """Takes idle entries of at least so many bytes out of the table, as far as there are any. Needs the lock.

        Returns:
            The files to be released.
        """
        paths: list[Path] = []
        idle = [entry_id for entry_id, entry in self._entries.items() if _may_go(entry)]
        for entry_id in sorted(idle, key=lambda entry_id: self._entries[entry_id].priority):
            if num_bytes <= 0:
                break
            entry = self._entries.pop(entry_id)
            paths += entry.built.paths
            self._clock = max(self._clock, entry.priority)
            num_bytes -= entry.size_bytes
        return paths

    def _make_free(self, num_bytes: int) -> None:
        """Removes idle entries so that there are so many bytes more, as far as that goes.

        Waits for workers that keep the files of entries which are gone, if it takes those bytes.
        """
        deadline = time.monotonic() + _LET_GO_SECONDS
        self._store.sweep()
        while True:
            free_bytes = self._store.free_bytes()
            with self._lock:
                lacking = max(self._taken_bytes() + num_bytes - self._budget_bytes, num_bytes - free_bytes)
                evicted = self._evict(lacking)
            if evicted:
                # More than once, since what other entries share is not freed with an entry.
                self._store.release(evicted)
                continue
            if lacking <= 0 or not self._store.has_leaving or time.monotonic() > deadline:
                return
            time.sleep(_LOOK_SECONDS)
            self._store.sweep()

    def _taken_bytes(self) -> int:
        """Of the budget. Needs the lock; a build that publishes meanwhile may be counted twice, never not at all."""
        return self._store.used_bytes + self._reserved_bytes

    def reserve(self, size_bytes: int, *, held_bytes: int) -> None:
        """Takes what is lacking of so many bytes from the budget, and removes idle entries for them: for Room.

        Raises:
            ResourceExhaustedError: reason CACHE_FULL; over the budget, or no room in the filesystem.
        """
        self._make_free(size_bytes - held_bytes)
        free_bytes = self._store.free_bytes()
        with self._lock:
            used_bytes = self._taken_bytes() - held_bytes
            if used_bytes + size_bytes > self._budget_bytes:
                raise ResourceExhaustedError(
                    f"the slices of this adapter take {size_bytes} bytes; the cache holds {used_bytes} of its "
                    f"budget of {self._budget_bytes} bytes (EPILORA_CACHE_BUDGET_BYTES). Unload an adapter or raise it",
                    reason="CACHE_FULL",
                    metadata={"needed": size_bytes, "used": used_bytes, "budget": self._budget_bytes},
                )
            if size_bytes - held_bytes > free_bytes:
                raise ResourceExhaustedError(
                    f"the slices of this adapter take {size_bytes} bytes; {self._store.directory} has {free_bytes} "
                    "free. Make its filesystem larger (in a container: the size of /dev/shm) or unload an adapter",
                    reason="CACHE_FULL",
                    metadata={"needed": size_bytes, "free": free_bytes},
                )
            self._reserved_bytes += size_bytes - held_bytes


def _may_go(entry: _Entry) -> bool:
    return not entry.leases and not entry.is_pinned


def _at(slices: Sequence[loader_service_pb2.Slice], paths: Sequence[Path]) -> tuple[loader_service_pb2.Slice, ...]:
    moved = []
    for piece, path in zip(slices, paths, strict=True):
        copy = loader_service_pb2.Slice()
        copy.CopyFrom(piece)
        copy.path = str(path)
        moved.append(copy)
    return tuple(moved)
