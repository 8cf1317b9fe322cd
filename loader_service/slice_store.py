"""The files of the slice cache: a directory in shared memory that one loader owns.

A slice file is named by the digest of its bytes; slices of equal bytes are one file. It is written in a directory of
its own and renamed when it is whole, so that a reader never sees a part. When no entry refers to a file any more its
name goes at once, which asks workers that keep it mapped to let go. Its bytes count until they have: whoever reads one
holds a shared lock on it (epilora/slices.py), which the kernel takes back from a process that dies. What a loader that
died left behind is removed by the next one at its start.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from epilora.errors import FailedPreconditionError

log = structlog.get_logger(__name__)

_OURS = re.compile(r"[0-9a-f]{32}(-\d+)?\.safetensors|unfinished-[0-9a-f]{32}")
_SIBLING = re.compile(r"epilora-(\d+)-[0-9a-f]{8}")
_LOCK_NAME = ".lock"
_LOCK_TIMEOUT_SECONDS = 5.0
_COMPARED_BYTES = 1 << 20


@dataclass(slots=True)
class _Stored:
    size_bytes: int
    num_references: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class _Leaving:
    """A file without a name, open here so that its lock can be asked for."""

    fd: int
    size_bytes: int


class SliceStore:
    """Thread-safe. `open` it before use."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._files: dict[Path, _Stored] = {}
        self._unused: set[Path] = set()
        """Without references, and not yet removed."""
        self._leaving: list[_Leaving] = []
        self._used_bytes = 0
        self._lock_fd = -1

    def open(self) -> None:
        """Takes the directory and removes what dead loaders left in it, and in those of other services of this user.

        Raises:
            FailedPreconditionError: reason CACHE_IN_USE; another loader owns it.
            OSError: it cannot be made or written.
        """
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_fd = os.open(self._directory / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + _LOCK_TIMEOUT_SECONDS
        while not _try_lock(self._lock_fd):
            if time.monotonic() > deadline:
                os.close(self._lock_fd)
                raise FailedPreconditionError(
                    f"another loader owns the cache directory {self._directory}; give each its own EPILORA_CACHE_DIR",
                    reason="CACHE_IN_USE",
                )
            time.sleep(0.05)
        _remove_left_over(self._directory)
        with suppress(OSError):
            for sibling in _siblings_of(self._directory):
                _reap(sibling)

    def close(self) -> None:
        """Removes all files and lets the directory go."""
        with self._lock:
            self._files.clear()
            self._unused.clear()
            self._used_bytes = 0
            for file in self._leaving:
                os.close(file.fd)
            self._leaving.clear()
        for path in _ours(self._directory):
            _remove(path)
        os.close(self._lock_fd)

    @property
    def used_bytes(self) -> int:
        """Of all files, those included whose names are gone and that somebody still reads."""
        with self._lock:
            return self._used_bytes

    @property
    def has_leaving(self) -> bool:
        """True if bytes come free once somebody lets go of files whose names are gone."""
        with self._lock:
            return self._used_bytes > sum(stored.size_bytes for stored in self._files.values())

    @property
    def directory(self) -> Path:
        """Where the files are."""
        return self._directory

    def free_bytes(self) -> int:
        """What the filesystem has left."""
        status = os.statvfs(self._directory)
        return status.f_bavail * status.f_frsize

    def make_unfinished(self) -> Path:
        """A new directory for files that are being written."""
        path = self._directory / f"unfinished-{uuid.uuid4().hex}"
        path.mkdir(mode=0o700)
        return path

    def discard(self, unfinished: Path) -> None:
        """Removes such a directory and what is in it."""
        shutil.rmtree(unfinished, ignore_errors=True)

    def add(self, path: Path, digest: str) -> Path:
        """Moves a whole file into the store, unless one of equal bytes is there. The caller gets a reference.

        Args:
            path: in a directory of `make_unfinished`.
            digest: of its bytes, 32 hex digits.

        Returns:
            Where the bytes are now.
        """
        size = path.stat().st_size
        for number in itertools.count():
            final = self._directory / f"{digest}{f'-{number}' if number else ''}.safetensors"
            with self._lock:
                if not final.exists():
                    self._move_in(path, final, size)
                    return final
                stored = self._files[final]
                stored.num_references += 1
                self._unused.discard(final)
            # The digest can be forged, and what is forged must not be served in place of somebody else's adapter.
            if stored.size_bytes == size and _have_equal_bytes(path, final):
                path.unlink()
                return final
            self.release([final])
        raise AssertionError("unreachable: count has no end")

    def release(self, paths: Iterable[Path]) -> int:
        """Gives references back; files without any lose their names. Returns the bytes that came free."""
        with self._lock:
            for path in paths:
                stored = self._files[path]
                stored.num_references -= 1
                if stored.num_references == 0:
                    self._unused.add(path)
        return self.sweep()

    def sweep(self) -> int:
        """Frees the files without references that nobody reads (any more). Returns the bytes that came free."""
        with self._lock:
            for path in self._unused:
                file = self._take_away(path, self._files.pop(path).size_bytes)
                self._leaving.append(file)
            self._unused.clear()
            leaving, self._leaving = self._leaving, []
        # A file goes with its last descriptor, and to free its pages takes a while: not under the lock.
        read = [file for file in leaving if not _free(file)]
        freed = sum(file.size_bytes for file in leaving) - sum(file.size_bytes for file in read)
        with self._lock:
            self._leaving += read
            self._used_bytes -= freed
        return freed

    def _move_in(self, path: Path, final: Path, size: int) -> None:
        path.rename(final)
        stored = self._files.get(final)
        if stored is not None:
            # Something else removed the file; entries that refer to it have it back now.
            stored.num_references += 1
            self._unused.discard(final)
            return
        self._files[final] = _Stored(size)
        self._used_bytes += size

    def _take_away(self, path: Path, size_bytes: int) -> _Leaving:
        """Takes a file's name. Whoever opens it at this moment either has its lock by then, or finds the name gone."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return _Leaving(fd=-1, size_bytes=size_bytes)
        path.unlink(missing_ok=True)
        return _Leaving(fd=fd, size_bytes=size_bytes)


def _free(file: _Leaving) -> bool:
    """Lets a file go; False, and it stays open, if somebody reads it."""
    if file.fd == -1:
        return True
    if not _try_lock(file.fd):
        return False
    os.close(file.fd)
    return True


def _ours(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if _OURS.fullmatch(path.name)]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _remove_left_over(directory: Path) -> None:
    left_over = _ours(directory)
    for path in left_over:
        _remove(path)
    if left_over:
        log.info("removed what another loader left", num_files=len(left_over), cache_dir=str(directory))


def _siblings_of(directory: Path) -> list[Path]:
    """Cache directories of other services of this user, as `epilora serve` names them."""
    return [
        path
        for path in directory.parent.iterdir()
        if path != directory and (match := _SIBLING.fullmatch(path.name)) and int(match[1]) == os.getuid()
    ]


def _reap(directory: Path) -> None:
    """Empties another loader's directory if that one is dead. The directory stays: a loader may be starting on it."""
    with suppress(OSError):
        fd = os.open(directory / _LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if _try_lock(fd):
                _remove_left_over(directory)
        finally:
            os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _have_equal_bytes(path: Path, other: Path) -> bool:
    with path.open("rb") as first, other.open("rb") as second:
        while block := first.read(_COMPARED_BYTES):
            if block != second.read(_COMPARED_BYTES):
                return False
        return not second.read(1)
