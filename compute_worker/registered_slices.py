"""Slice files of the cache that stay mapped and registered with the GPU's driver, so that later loads only copy.

To register pages costs twice what copying them does, so it is done once for each file, by a thread of its own after the
file's first load, some chunks at a time with pauses in which others get at the driver. It lasts until the loader takes
the file's name away, which means that it wants the bytes, or until other files need the room.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol

import numpy as np
import structlog
import torch

from epilora.slices import is_unlinked

REGISTERED_CHUNK_BYTES = 16 << 20
"""Registered, and copied, in one call: under a millisecond of the driver's lock."""
_LOOK_SECONDS = 0.1
"""Between two looks at the names of files that are kept."""
_CLOSE_SECONDS = 10.0
_PORTABLE, _READ_ONLY = 0x1, 0x8

_log = structlog.get_logger()


class Registrar(Protocol):
    """Makes pages of this process known to a device, which can then fetch them by itself."""

    def enter_thread(self) -> None:
        """To be called once in the thread that calls the others."""

    def register(self, pages: torch.Tensor) -> int:
        """0, or the driver's error."""

    def unregister(self, pages: torch.Tensor) -> int:
        """0, or the driver's error."""


class CudaRegistrar:
    """See Registrar: cudaHostRegister, of pages that are mapped for reading only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def enter_thread(self) -> None:
        """See Registrar."""
        # Without a number it is the current one, in every thread the first.
        if self._device.index is not None:
            torch.cuda.set_device(self._device)

    def register(self, pages: torch.Tensor) -> int:
        """See Registrar."""
        flags = _PORTABLE | _READ_ONLY
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        return int(cudart.cudaHostRegister(pages.data_ptr(), pages.numel(), flags))

    def unregister(self, pages: torch.Tensor) -> int:
        """See Registrar."""
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        return int(cudart.cudaHostUnregister(pages.data_ptr()))


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisteredState:
    """Numbers of RegisteredSlices: files and their bytes that are registered now, and what could not be."""

    num_files: int
    num_bytes: int
    num_failures: int


@dataclass(kw_only=True, slots=True)
class _Kept:
    stream: BinaryIO
    """Holds the shared lock, with the map."""
    size_bytes: int
    map: mmap.mmap | None = None
    chunks: list[torch.Tensor] = field(default_factory=list)
    """uint8, the registered pages in order."""
    is_ready: bool = False
    num_copies: int = 0
    """Under way."""
    used_at: float = 0.0


class RegisteredSlices:
    """Thread-safe. Owns a thread, which does everything that takes long.

    Args:
        registrar: of the device.
        max_bytes: that may be registered.
        chunk_bytes: see REGISTERED_CHUNK_BYTES; a multiple of the page size.
    """

    def __init__(self, registrar: Registrar, *, max_bytes: int, chunk_bytes: int = REGISTERED_CHUNK_BYTES) -> None:
        assert max_bytes > 0, max_bytes
        assert chunk_bytes % mmap.PAGESIZE == 0, chunk_bytes
        self._registrar = registrar
        self._max_bytes = max_bytes
        self._chunk_bytes = chunk_bytes
        self._changed = threading.Condition()
        self._kept: dict[tuple[int, int], _Kept] = {}
        """By device and inode: a number that no other file gets while this one is open."""
        self._waiting: deque[tuple[int, int]] = deque()
        self._num_failures = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="registered-slices", daemon=True)
        self._thread.start()

    @contextmanager
    def borrow(self, stream: BinaryIO) -> Iterator[Sequence[torch.Tensor] | None]:
        """The registered pages of an open slice file; None if it is not registered.

        They stay until the block ends, before which whatever copies from them must have ended.

        Returns:
            uint8 tensors, the file's bytes in order; each may be copied by one call, no two together.
        """
        with self._changed:
            kept = self._kept.get(_key(stream))
            if kept is not None and kept.is_ready:
                kept.num_copies += 1
                kept.used_at = time.monotonic()
            else:
                kept = None
        try:
            yield kept.chunks if kept is not None else None
        finally:
            if kept is not None:
                with self._changed:
                    kept.num_copies -= 1
                    self._changed.notify_all()

    def keep(self, stream: BinaryIO) -> None:
        """Has an open slice file registered soon, if there is room for it, for the next load of it. Returns at once."""
        size = os.fstat(stream.fileno()).st_size
        with self._changed:
            key = _key(stream)
            if self._num_failures or self._is_closing or key in self._kept or not 0 < size <= self._max_bytes:
                return
            # The same open file, so the same lock: there is no moment without one.
            own = os.fdopen(os.dup(stream.fileno()), "rb")
            self._kept[key] = _Kept(stream=own, size_bytes=size, used_at=time.monotonic())
            self._waiting.append(key)
            self._changed.notify_all()

    def state(self) -> RegisteredState:
        """Numbers now."""
        with self._changed:
            ready = [kept.size_bytes for kept in self._kept.values() if kept.is_ready]
            return RegisteredState(num_files=len(ready), num_bytes=sum(ready), num_failures=self._num_failures)

    def close(self) -> None:
        """Lets go of all files; those that are copied from stay until the process ends."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            self._registrar.enter_thread()
            self._tend()
        except Exception as error:
            # Without this thread nobody would let go of files that the loader wants back.
            self._abandon(error)

    def _abandon(self, error: Exception) -> None:
        with self._changed:
            self._num_failures += 1
            left = list(self._kept.values())
            self._kept.clear()
            self._waiting.clear()
        _log.error("slices are registered with the GPU no more", num_files=len(left), exc_info=error)
        for kept in left:
            # What a copy reads at this moment goes with the copy's reference to it.
            if not kept.num_copies:
                with suppress(Exception):
                    self._let_go(kept)

    def _tend(self) -> None:
        while True:
            with self._changed:
                if not self._waiting and not self._is_closing:
                    self._changed.wait(_LOOK_SECONDS if self._kept else None)
                going = [self._take(key) for key in self._going()]
                wanted = self._next_wanted() if not going else None
                is_closed = self._is_closing and not going
            for kept in going:
                self._let_go(kept)
            if wanted is not None:
                self._register(wanted)
            if is_closed:
                return

    def _going(self) -> list[tuple[int, int]]:
        """Files to let go of: the loader has taken their names, or a waiting one needs their room. Needs the lock."""
        going = [key for key, kept in self._kept.items() if self._is_closing or is_unlinked(kept.stream)]
        if self._waiting and self._waiting[0] not in going:
            left = {key: kept for key, kept in self._kept.items() if key not in going and key not in self._waiting}
            lacking = sum(kept.size_bytes for kept in left.values()) - self._max_bytes
            lacking += self._kept[self._waiting[0]].size_bytes
            for key in sorted(left, key=lambda key: left[key].used_at):
                if lacking > 0 and not left[key].num_copies:
                    lacking -= left[key].size_bytes
                    going.append(key)
        return [key for key in going if not self._kept[key].num_copies]

    def _take(self, key: tuple[int, int]) -> _Kept:
        if key in self._waiting:
            self._waiting.remove(key)
        return self._kept.pop(key)

    def _next_wanted(self) -> _Kept | None:
        """The next file to register; one that has no room is given up. Needs the lock."""
        if not self._waiting:
            return None
        key = self._waiting.popleft()
        used = sum(kept.size_bytes for other, kept in self._kept.items() if other not in self._waiting)
        if used <= self._max_bytes:
            return self._kept[key]
        self._kept.pop(key).stream.close()
        return None

    def _register(self, kept: _Kept) -> None:
        start = time.perf_counter()
        try:
            kept.map = mmap.mmap(kept.stream.fileno(), kept.size_bytes, access=mmap.ACCESS_READ)
        except OSError as refused:
            self._give_up(kept, str(refused))
            return
        for chunk in torch.split(_pages(kept.map), self._chunk_bytes):
            began = time.perf_counter()
            error = self._registrar.register(chunk)
            if error:
                self._give_up(kept, f"cudaHostRegister returned {error}")
                return
            kept.chunks.append(chunk)
            if self._is_closing or is_unlinked(kept.stream):
                return
            time.sleep(time.perf_counter() - began)
        with self._changed:
            kept.is_ready = True
        seconds = time.perf_counter() - start
        _log.info("slice registered", bytes=kept.size_bytes, seconds=round(seconds, 4))

    def _give_up(self, kept: _Kept, why: str) -> None:
        """The first failure is the last: the next file would fail as well, and steps wait for the driver meanwhile."""
        with self._changed:
            self._num_failures += 1
            self._kept.pop(_key(kept.stream))
            for key in self._waiting:
                self._kept.pop(key).stream.close()
            self._waiting.clear()
        _log.warning(
            "slices are not registered with the GPU; each load copies through buffers, at less than half the rate",
            why=why,
            bytes=kept.size_bytes,
        )
        self._let_go(kept)

    def _let_go(self, kept: _Kept) -> None:
        """What is not in the table any more, and no copy reads."""
        for chunk in kept.chunks:
            error = self._registrar.unregister(chunk)
            if error:
                _log.error("pages of a slice could not be unregistered", cuda_error=error)
        kept.chunks.clear()
        if kept.map is not None:
            kept.map.close()
        kept.stream.close()


def _key(stream: BinaryIO) -> tuple[int, int]:
    status = os.fstat(stream.fileno())
    return status.st_dev, status.st_ino


def _pages(pages: mmap.mmap) -> torch.Tensor:
    """uint8 [size]. Knows nothing of the map, so that this can be closed; torch warns of memory that is read-only."""
    size = len(pages)
    address = np.frombuffer(pages, np.uint8).ctypes.data
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
