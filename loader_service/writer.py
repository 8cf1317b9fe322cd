"""Copying the parts of an adapter to its slice files: every needed range of the source is read once.

The source is read with pread into one buffer, not mapped: a file that shrinks while it is read is then an error, not
a SIGBUS. Slice files are allocated in full first, for the same reason, and then mapped.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from epilora.adapters.normal_form import NUMPY_DTYPE
from epilora.adapters.safetensors_header import TensorEntry
from epilora.adapters.slice_plan import Copy, SlicePlan
from epilora.errors import AbortedError, AdapterFormatError, ResourceExhaustedError, UnavailableError

BLOCK_BYTES = 8 << 20
"""Bytes of the read buffer. A tensor larger than it is read in blocks of rows."""

Bytes = npt.NDArray[np.uint8]


class BuildCancelledError(UnavailableError):
    """Nobody waits for the build any more, or the loader stops."""


class BuildProgress:
    """How far a build is; written by its thread, read by the event loop."""

    def __init__(self) -> None:
        self.bytes_done = 0
        self.bytes_total = 0
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Makes the build stop at its next block."""
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        """True after cancel."""
        return self._cancelled.is_set()

    def check(self) -> None:
        """Raises BuildCancelledError after cancel."""
        if self._cancelled.is_set():
            raise BuildCancelledError("the build was cancelled; load the adapter again", reason="BUILD_CANCELLED")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Unit:
    """Rows of one tensor that are read together."""

    tensor: TensorEntry
    row_begin: int
    row_end: int

    @property
    def row_bytes(self) -> int:
        return self.tensor.size_bytes // self.tensor.num_rows

    @property
    def offset(self) -> int:
        return self.tensor.offset + self.row_begin * self.row_bytes

    @property
    def size_bytes(self) -> int:
        return (self.row_end - self.row_begin) * self.row_bytes


@dataclass(slots=True)
class WriteResult:
    """What a write found out."""

    bytes_read: int = 0
    nonzero: set[int] = field(default_factory=set)
    """Indices of the tensors in which something other than zero was seen."""


def write_slices(plan: SlicePlan, source_fd: int, paths: Sequence[Path], progress: BuildProgress) -> WriteResult:
    """Writes the slice files of a plan.

    Args:
        plan: the plan.
        source_fd: the adapter's weights.
        paths: one new file per slice, mode 0600.
        progress: updated; checked for cancellation between blocks.

    Raises:
        AdapterFormatError: reason NON_FINITE; a tensor holds NaN or an infinity.
        AbortedError: reason SOURCE_CHANGED; the source became shorter.
        ResourceExhaustedError: reason CACHE_FULL; the filesystem has no room.
        BuildCancelledError: progress was cancelled.
    """
    with ExitStack() as stack:
        files = [
            stack.enter_context(_MappedFile(path, layout.size_bytes))
            for path, layout in zip(paths, plan.layouts, strict=True)
        ]
        for file, layout, constants in zip(files, plan.layouts, plan.constants, strict=True):
            file.put(0, layout.header)
            for offset, value in constants.items():
                file.put(offset, value)
            progress.bytes_done += len(layout.header)
        return _Copier(plan, source_fd, files, progress).run()


def digest_of_file(path: Path, progress: BuildProgress) -> str:
    """xxh3-128 of a file's bytes, 32 hex digits. Against accidents, not against forgery."""
    digest = xxhash.xxh3_128()
    buffer = bytearray(BLOCK_BYTES)
    with path.open("rb", buffering=0) as stream:
        while size := stream.readinto(buffer):
            progress.check()
            digest.update(memoryview(buffer)[:size])
    return digest.hexdigest()


class _MappedFile:
    """A new file of a given size, mapped for writing."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size

    def __enter__(self) -> _MappedFile:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, self._size)
            self._map = mmap.mmap(fd, self._size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise
            raise ResourceExhaustedError(
                f"no room for {self._size} bytes in {self._path.parent.parent}: {error.strerror}", reason="CACHE_FULL"
            ) from error
        finally:
            os.close(fd)
        self.bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        return self

    def __exit__(self, *_: object) -> None:
        del self.bytes
        # After an error, its traceback may still hold a view of the map, which then goes with it.
        with suppress(BufferError):
            self._map.close()

    def put(self, offset: int, value: bytes) -> None:
        """Writes a few bytes."""
        self._map[offset : offset + len(value)] = value


def _units(plan: SlicePlan) -> Iterator[_Unit]:
    """The rows to read, in order of the file."""
    for copies in plan.copies.values():
        tensor = copies[0].region.tensor
        rows_per_block = max(1, BLOCK_BYTES // max(1, tensor.size_bytes // tensor.num_rows))
        for begin, end in _merged((copy.region.row_begin, copy.region.row_end) for copy in copies):
            for block in range(begin, end, rows_per_block):
                yield _Unit(tensor=tensor, row_begin=block, row_end=min(block + rows_per_block, end))


def _merged(ranges: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """Overlapping and touching ranges made one."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(set(ranges)):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _batches(units: Iterator[_Unit], limit: int) -> Iterator[list[_Unit]]:
    """Units that follow each other in the file without a gap, up to `limit` bytes."""
    batch: list[_Unit] = []
    size = 0
    for unit in units:
        follows = batch and batch[-1].offset + batch[-1].size_bytes == unit.offset
        if batch and (not follows or size + unit.size_bytes > limit):
            yield batch
            batch, size = [], 0
        batch.append(unit)
        size += unit.size_bytes
    if batch:
        yield batch


def _largest_row(plan: SlicePlan) -> int:
    tensors = [copies[0].region.tensor for copies in plan.copies.values()]
    return max((tensor.size_bytes // tensor.num_rows for tensor in tensors), default=0)


def _read(fd: int, buffer: Bytes, offset: int) -> None:
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:].data], offset + done)
        if count == 0:
            raise AbortedError(
                f"the adapter's weights ended at byte {offset + done} while they were read: the file was changed",
                reason="SOURCE_CHANGED",
            )
        done += count


class _Copier:
    """Reads the source batch by batch and copies its parts."""

    def __init__(self, plan: SlicePlan, source_fd: int, files: Sequence[_MappedFile], progress: BuildProgress) -> None:
        self._plan = plan
        self._source_fd = source_fd
        self._files = files
        self._progress = progress
        self._result = WriteResult()

    def run(self) -> WriteResult:
        buffer = np.empty(max(BLOCK_BYTES, _largest_row(self._plan)), dtype=np.uint8)
        for batch in _batches(_units(self._plan), len(buffer)):
            self._progress.check()
            size = batch[-1].offset + batch[-1].size_bytes - batch[0].offset
            _read(self._source_fd, buffer[:size], batch[0].offset)
            self._result.bytes_read += size
            self._copy_batch(batch, buffer[:size])
        return self._result

    def _copy_batch(self, batch: Sequence[_Unit], buffer: Bytes) -> None:
        same_dtype = len({unit.tensor.dtype for unit in batch}) == 1
        check_each = not (same_dtype and _is_finite(buffer, batch[0].tensor.dtype))
        nonzero = self._result.nonzero
        for unit in batch:
            start = unit.offset - batch[0].offset
            raw = buffer[start : start + unit.size_bytes]
            if check_each and not _is_finite(raw, unit.tensor.dtype):
                raise AdapterFormatError(
                    f"tensor {unit.tensor.name} holds NaN or infinite values; the training run that wrote it diverged",
                    reason="NON_FINITE",
                    metadata={"tensor": unit.tensor.name},
                )
            if unit.tensor.index not in nonzero and raw.any():
                nonzero.add(unit.tensor.index)
            for copy in self._plan.copies[unit.tensor.index]:
                self._progress.bytes_done += _copy(copy, unit, raw, self._files[copy.slice_index].bytes)


def _copy(copy: Copy, unit: _Unit, raw: Bytes, target: Bytes) -> int:
    """Copies what a block of rows has of a matrix. Returns the bytes written."""
    region = copy.region
    begin, end = max(unit.row_begin, region.row_begin), min(unit.row_end, region.row_end)
    if begin >= end:
        return 0
    if region.column_step == 1 and region.column_begin == 0 and not region.transpose:
        size = (end - begin) * unit.row_bytes
        source_start = (begin - unit.row_begin) * unit.row_bytes
        target_start = copy.offset + (begin - region.row_begin) * unit.row_bytes
        target[target_start : target_start + size] = raw[source_start : source_start + size]
        return size
    dtype = NUMPY_DTYPE[unit.tensor.dtype]
    block = raw.view(dtype).reshape(unit.row_end - unit.row_begin, -1)
    part = block[begin - unit.row_begin : end - unit.row_begin, region.column_begin :: region.column_step]
    matrix: npt.NDArray[Any] = target[copy.offset : copy.offset + region.size_bytes].view(dtype).reshape(region.shape)
    place = slice(begin - region.row_begin, end - region.row_begin)
    if region.transpose:
        matrix[:, place] = part.T
    else:
        matrix[place] = part
    return part.nbytes


def _is_finite(raw: Bytes, dtype: str) -> bool:
    if dtype == "BF16":
        return not bool(((raw.view("<u2") & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(raw.view({"F32": "<f4", "F16": "<f2"}[dtype])).all())
