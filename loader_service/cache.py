"""The slice cache: a directory in shared memory that one loader owns, with a byte budget and leases.

An entry is a directory of slice files, named by a digest. It is written under another name and renamed when it is
whole, so that a reader never sees a part. When its last lease is given back it is idle: removed, unless idle entries
may be kept. Of those the first to go is the one that is cheapest to build again for its size, and was not used for
long. What a loader that died left behind is removed by the next one at its start.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from epilora.errors import FailedPreconditionError, ResourceExhaustedError
from epilora.v1 import loader_service_pb2, types_pb2

log = structlog.get_logger(__name__)

_ENTRY_NAME = re.compile(r"[0-9a-f]{32}")
_UNFINISHED, _TRASH = "unfinished-", "trash-"
_LOCK_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltSlices:
    """What one build made."""

    adapter_digest: str
    slices: tuple[loader_service_pb2.Slice, ...]
    """In the order of the load specs."""
    report: types_pb2.AdapterLoadReport


@dataclass(slots=True)
class _Entry:
    built: BuiltSlices
    size_bytes: int
    seconds: float
    """That its build took."""
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


class SliceCache:
    """Thread-safe. `open` it before use."""

    def __init__(self, directory: Path, budget_bytes: int, *, idle_bytes: int = 0) -> None:
        """Args:
        directory: in shared memory, this loader's own.
        budget_bytes: that all entries may take.
        idle_bytes: that entries without leases may take of it; 0: they are removed.
        """
        self._directory = directory
        self._budget_bytes = budget_bytes
        self._idle_bytes = idle_bytes
        self._clock = 0.0
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._entry_of_lease: dict[str, str] = {}
        self._used_bytes = 0
        self._num_builds = 0
        self._lock_fd = -1

    def open(self) -> None:
        """Takes the directory and removes what a dead loader left in it.

        Raises:
            FailedPreconditionError: reason CACHE_IN_USE; another loader owns it.
            OSError: it cannot be made or written.
        """
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_fd = os.open(self._directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + _LOCK_TIMEOUT_SECONDS
        while not self._try_lock():
            if time.monotonic() > deadline:
                os.close(self._lock_fd)
                raise FailedPreconditionError(
                    f"another loader owns the cache directory {self._directory}; give each its own EPILORA_CACHE_DIR",
                    reason="CACHE_IN_USE",
                )
            time.sleep(0.05)
        left_over = [path for path in self._directory.iterdir() if _is_ours(path.name)]
        for path in left_over:
            shutil.rmtree(path)
        if left_over:
            log.info("removed what another loader left", num_entries=len(left_over), cache_dir=str(self._directory))

    def close(self) -> None:
        """Removes all entries and lets the directory go."""
        with self._lock:
            self._entries.clear()
            self._entry_of_lease.clear()
        for path in self._directory.iterdir():
            if _is_ours(path.name):
                shutil.rmtree(path, ignore_errors=True)
        os.close(self._lock_fd)

    def build(self, entry_id: str, size_bytes: int, write: Callable[[Path], BuiltSlices], *, lease: str) -> BuiltSlices:
        """Makes an entry: reserves its bytes, has it written, and publishes it. All or nothing.

        Args:
            entry_id: 32 hex digits.
            size_bytes: of all its files.
            write: writes the files into the directory it is given, which will be renamed to `path_of(entry_id)`.
            lease: the builder's, so that the entry stays until those who wait for it have theirs.

        Raises:
            ResourceExhaustedError: reason CACHE_FULL; over the budget, or no room in the filesystem.
        """
        self._reserve(size_bytes)
        start = time.monotonic()
        unfinished = self._directory / f"{_UNFINISHED}{uuid.uuid4().hex}"
        try:
            unfinished.mkdir(mode=0o700)
            built = write(unfinished)
            with self._lock:
                unfinished.rename(self.path_of(entry_id))
                seconds = time.monotonic() - start
                self._entries[entry_id] = _Entry(built=built, size_bytes=size_bytes, seconds=seconds)
                self._num_builds += 1
                self._add_lease(entry_id, lease)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            with self._lock:
                self._used_bytes -= size_bytes
            raise
        return built

    def path_of(self, entry_id: str) -> Path:
        """Directory of an entry."""
        return self._directory / entry_id

    def lease(self, entry_id: str, lease: str) -> BuiltSlices | None:
        """Adds a lease to an entry; None if there is no such entry."""
        with self._lock:
            entry = self._entries.get(entry_id)
            if entry is None:
                return None
            if not self.path_of(entry_id).is_dir():
                log.error("an entry's files were removed by something else", entry=entry_id)
                self._forget(entry_id)
                return None
            self._add_lease(entry_id, lease)
            return entry.built

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
            idle = sum(other.size_bytes for other in self._entries.values() if not other.leases)
            trash = self._evict(idle - self._idle_bytes)
        return self._remove(trash)

    def state(self) -> CacheState:
        """Numbers now."""
        with self._lock:
            return CacheState(
                num_entries=len(self._entries),
                used_bytes=self._used_bytes,
                budget_bytes=self._budget_bytes,
                num_builds=self._num_builds,
                num_leases=len(self._entry_of_lease),
            )

    def _add_lease(self, entry_id: str, lease: str) -> None:
        self._entries[entry_id].leases.add(lease)
        self._entry_of_lease[lease] = entry_id

    def _forget(self, entry_id: str) -> None:
        entry = self._entries.pop(entry_id)
        for lease in entry.leases:
            del self._entry_of_lease[lease]
        self._used_bytes -= entry.size_bytes

    def _evict(self, num_bytes: int) -> list[tuple[Path, int]]:
        """Takes idle entries of at least so many bytes out of the way, as far as there are any. Needs the lock.

        Out of the way first: a new build of the same entry may publish while the files are being removed.
        """
        trash: list[tuple[Path, int]] = []
        idle = [entry_id for entry_id, entry in self._entries.items() if not entry.leases]
        for entry_id in sorted(idle, key=lambda entry_id: self._entries[entry_id].priority):
            if num_bytes <= 0:
                break
            entry = self._entries.pop(entry_id)
            path = self._directory / f"{_TRASH}{uuid.uuid4().hex}"
            with suppress(FileNotFoundError):
                self.path_of(entry_id).rename(path)
            trash.append((path, entry.size_bytes))
            self._clock = max(self._clock, entry.priority)
            num_bytes -= entry.size_bytes
        return trash

    def _remove(self, trash: list[tuple[Path, int]]) -> int:
        """Removes what was taken out of the way, without the lock. Returns the bytes."""
        for path, _ in trash:
            shutil.rmtree(path, ignore_errors=True)
        num_bytes = sum(size for _, size in trash)
        with self._lock:
            self._used_bytes -= num_bytes
        return num_bytes

    def _make_room(self, size_bytes: int) -> None:
        """Removes idle entries that a build of so many bytes needs gone."""
        status = os.statvfs(self._directory)
        with self._lock:
            over_budget = self._used_bytes + size_bytes - self._budget_bytes
            trash = self._evict(max(over_budget, size_bytes - status.f_bavail * status.f_frsize))
        self._remove(trash)

    def _reserve(self, size_bytes: int) -> None:
        self._make_room(size_bytes)
        status = os.statvfs(self._directory)
        free_bytes = status.f_bavail * status.f_frsize
        with self._lock:
            if self._used_bytes + size_bytes > self._budget_bytes:
                raise ResourceExhaustedError(
                    f"the slices of this adapter take {size_bytes} bytes; the cache holds {self._used_bytes} of its "
                    f"budget of {self._budget_bytes} bytes (EPILORA_CACHE_BUDGET_BYTES). Unload an adapter or raise it",
                    reason="CACHE_FULL",
                    metadata={"needed": size_bytes, "used": self._used_bytes, "budget": self._budget_bytes},
                )
            if size_bytes > free_bytes:
                raise ResourceExhaustedError(
                    f"the slices of this adapter take {size_bytes} bytes; {self._directory} has {free_bytes} free. "
                    "Make its filesystem larger (in a container: the size of /dev/shm) or unload an adapter",
                    reason="CACHE_FULL",
                    metadata={"needed": size_bytes, "free": free_bytes},
                )
            self._used_bytes += size_bytes

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _is_ours(name: str) -> bool:
    return bool(_ENTRY_NAME.fullmatch(name)) or name.startswith((_UNFINISHED, _TRASH))
