"""Copying the parts of an adapter to its slice files.

The source is read with preadv, not mapped: a file that shrinks while it is read is then an error, not a SIGBUS. Values
are checked while they are in the processor's cache. Slice files are written front to back (slice_file.py), each by one
thread; a matrix that several slices of a thread hold is read once.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from epilora.adapters.normal_form import NUMPY_DTYPE, Region
from epilora.adapters.slice_plan import Piece, SlicePlan
from epilora.adapters.tensor_entry import FLOAT_BYTES, TensorEntry
from epilora.adapters.values import is_finite, non_finite
from epilora.errors import UnavailableError
from loader_service.gather import FEW_BYTES, BlockWriter, Gatherer, read_rest
from loader_service.slice_file import BLOCK_BYTES, Bytes, SliceFile
from loader_service.write_result import WriteResult

TRANSPOSE_BYTES = 32 << 20
"""Bytes of matrices that each thread takes out of a tensor's columns in one pass over the tensor."""
_MAX_THREADS = 4
_BYTES_PER_THREAD = 32 << 20
"""Less is not worth a thread, and what several slices share is read once for each."""


class BuildCancelledError(UnavailableError):
    """Nobody waits for the build any more, or the loader stops."""


class BuildProgress:
    """How far a build is; written by its threads, read by the event loop."""

    def __init__(self) -> None:
        self.bytes_done = 0
        self.bytes_total = 0
        self._lock = threading.Lock()
        self._cancelled = threading.Event()

    def add(self, num_bytes: int) -> None:
        """Counts bytes as done, in any thread."""
        with self._lock:
            self.bytes_done += num_bytes

    def cancel(self) -> None:
        """Makes the build stop at its next block."""
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        """True after cancel."""
        return self._cancelled.is_set()

    def wait(self, seconds: float) -> None:
        """Waits for so long, or until cancel."""
        self._cancelled.wait(seconds)

    def check(self) -> None:
        """Raises BuildCancelledError after cancel."""
        if self._cancelled.is_set():
            raise BuildCancelledError("the build was cancelled; load the adapter again", reason="BUILD_CANCELLED")


def write_slices(
    plan: SlicePlan, source_fds: Sequence[int], paths: Sequence[Path], progress: BuildProgress
) -> WriteResult:
    """Writes the slice files of a plan.

    Args:
        plan: the plan.
        source_fds: the adapter's weight files, by TensorEntry.file.
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
            stack.enter_context(SliceFile(path, layout.size_bytes))
            for path, layout in zip(paths, plan.layouts, strict=True)
        ]
        num_threads = min(len(files), os.cpu_count() or 1, _MAX_THREADS, 1 + plan.size_bytes // _BYTES_PER_THREAD)
        stop = threading.Event()
        # A second thread for each, where there are cores for it: it digests and writes what the first one has read.
        has_writers = (os.cpu_count() or 1) >= 2 * num_threads
        copiers = [_Copier(source_fds, files, progress, stop, has_writer=has_writers) for _ in range(num_threads)]
        # Neighbours together: what they take of a tensor's columns lies side by side.
        ends = [len(files) * number // num_threads for number in range(num_threads + 1)]
        groups = [range(*pair) for pair in itertools.pairwise(ends)]
        if num_threads == 1:
            copiers[0].copy_slices(plan, groups[0])
        else:
            _run_all([partial(copier.copy_slices, plan, group) for copier, group in zip(copiers, groups, strict=True)])
        result = copiers[0].result
        for copier in copiers[1:]:
            result.add(copier.result)
        result.digests = tuple(file.digest() for file in files)
        return result


def _run_all(calls: Sequence[Callable[[], None]]) -> None:
    """Makes calls in threads, and raises what the first one that failed has raised, after all have ended."""
    with ThreadPoolExecutor(len(calls), thread_name_prefix="slices") as threads:
        running = [threads.submit(call) for call in calls]
        errors = [error for call in as_completed(running) if (error := call.exception()) is not None]
    if errors:
        raise errors[0]


class _Span(NamedTuple):
    """Bytes of one tensor that follow each other in the file. A tuple, since an adapter has tens of thousands."""

    tensor: TensorEntry
    offset: int
    size: int
    matrix_offset: int = -1
    """First byte of the matrix that it is a part of; -1: it is a whole one."""


class _Copier:
    """Copies the matrices of one tensor name after another."""

    def __init__(
        self,
        source_fds: Sequence[int],
        files: Sequence[SliceFile],
        progress: BuildProgress,
        stop: threading.Event,
        *,
        has_writer: bool,
    ) -> None:
        self._source_fds = source_fds
        self._files = files
        self._progress = progress
        self._stop = stop
        self.result = WriteResult()
        self._blocks = BlockWriter(has_thread=has_writer)
        # What is taken out of columns; kept, since new memory would have to be cleared by the kernel each time.
        self._columns = np.empty(0, dtype=np.uint8)
        self._gatherers = [Gatherer(file, source_fds[0], self._blocks, self.result) for file in files]

    def copy_slices(self, plan: SlicePlan, slices: range) -> None:
        """Writes some slices from beginning to end; if that fails, the other threads stop, too."""
        try:
            with self._blocks:
                for index in slices:
                    self._files[index].put(plan.layouts[index].header)
                for pieces in plan.tensors:
                    mine = [piece for piece in pieces if piece.slice_index in slices]
                    if mine:
                        self.copy(mine)
                for index in slices:
                    self._gatherers[index].settle()
            for index in slices:
                self._files[index].finish()
        except BaseException:
            self._stop.set()
            raise

    def copy(self, pieces: Sequence[Piece]) -> None:
        """Appends what each slice has under one name."""
        self._check()
        others = []
        for piece in pieces:
            gatherer = self._gatherers[piece.slice_index]
            if gatherer.takes(piece):
                gatherer.add(piece)
            else:
                gatherer.settle()
                others.append(piece)
        if others:
            self._copy_now(others)
        self._progress.add(sum([piece.size_bytes for piece in pieces]))

    def _copy_now(self, pieces: Sequence[Piece]) -> None:
        """Appends pieces to their files, block by block."""
        for piece in pieces:
            self._files[piece.slice_index].pad_to(piece.offset)
        if not pieces[0].regions:
            for piece in pieces:
                self._files[piece.slice_index].put(piece.constant)
        elif any(region.column_step != 1 for region in pieces[0].regions):
            self._copy_columns(pieces)
        elif any(region.transpose for region in pieces[0].regions):
            self._copy_transposed(pieces)
        else:
            self._copy_rows(pieces)
        for piece in pieces:
            assert self._files[piece.slice_index].position == piece.offset + piece.size_bytes, piece

    def _check(self) -> None:
        self._progress.check()
        if self._stop.is_set():
            raise BuildCancelledError("another part of the build failed", reason="BUILD_CANCELLED")

    def _copy_rows(self, pieces: Sequence[Piece]) -> None:
        """Matrices of whole rows; one that several slices hold is read once."""
        shared = len(pieces) > 1 and all(piece.regions == pieces[0].regions for piece in pieces[1:])
        for piece in pieces[:1] if shared else pieces:
            file = self._files[piece.slice_index]
            for batch, size in _batches(piece.regions):
                block = file.take(size)
                self._read(batch, block)
                for other in pieces[1:] if shared else ():
                    self._files[other.slice_index].put(block)

    def _copy_transposed(self, pieces: Sequence[Piece]) -> None:
        """Matrices of whole rows, each of which is turned."""
        for piece in pieces:
            for region in piece.regions:
                raw = np.empty(region.size_bytes, dtype=np.uint8)
                self._read_all(region.tensor, _row_offset(region.tensor, region.row_begin), raw)
                matrix = raw.view(NUMPY_DTYPE[region.tensor.dtype]).reshape(region.row_end - region.row_begin, -1)
                self._files[piece.slice_index].put(np.ascontiguousarray(matrix.T).reshape(-1).view(np.uint8))

    def _copy_columns(self, pieces: Sequence[Piece]) -> None:
        """Matrices of every n-th column, several of them in one pass over their tensor."""
        wanted = [(piece.slice_index, region) for piece in pieces for region in piece.regions]
        per_pass = max(1, TRANSPOSE_BYTES // max(region.size_bytes for _, region in wanted))
        for start in range(0, len(wanted), per_pass):
            part = wanted[start : start + per_pass]
            matrices = self._take_columns([region for _, region in part])
            for slice_index, group in itertools.groupby(range(len(part)), key=lambda number: part[number][0]):
                numbers = list(group)
                # Of one slice they lie one after another, as in its file.
                block = matrices[numbers[0] : numbers[-1] + 1].reshape(-1).view(np.uint8)
                for begin in range(0, len(block), BLOCK_BYTES):
                    self._files[slice_index].put_block(block[begin : begin + BLOCK_BYTES])

    def _take_columns(self, regions: Sequence[Region]) -> npt.NDArray[Any]:
        """The matrices of regions with the same tensor, rows, step and direction, in memory of this copier's."""
        first = regions[0]
        tensor, step = first.tensor, first.column_step
        columns = [region.column_begin for region in regions]
        # Neighbouring experts are the common case, and a slice is several times as fast as a list.
        chosen = slice(columns[0], columns[-1] + 1) if _is_range(columns) else columns
        num_rows, per_matrix = first.row_end - first.row_begin, tensor.num_columns // step
        dtype = NUMPY_DTYPE[tensor.dtype]
        shape = (len(regions), num_rows, per_matrix)
        if self._columns.size < math.prod(shape) * dtype.itemsize:
            self._columns = np.empty(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
        taken = self._columns[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
        row_bytes = tensor.num_columns * FLOAT_BYTES[tensor.dtype]
        # A block: it and what it is copied to stay in the cache together.
        rows = max(1, BLOCK_BYTES // row_bytes)
        buffer = np.empty(rows * row_bytes, dtype=np.uint8)
        for begin in range(0, num_rows, rows):
            end = min(begin + rows, num_rows)
            raw = buffer[: (end - begin) * row_bytes]
            self._read_all(tensor, _row_offset(tensor, first.row_begin + begin), raw)
            flat = raw.view(dtype).reshape(-1, step)[:, chosen]
            taken[:, begin:end] = flat.T.reshape(len(regions), end - begin, per_matrix)
        # The first row decides for nearly all matrices that are not zero.
        for index in np.flatnonzero(~taken[:, 0].any(axis=1)) if num_rows else ():
            if not taken[index].any():
                self.result.zero_columns.add((tensor.index, columns[index]))
        return taken.transpose(0, 2, 1).copy() if first.transpose else taken

    def _read_all(self, tensor: TensorEntry, offset: int, target: Bytes) -> None:
        """Reads and checks a part of a tensor, of any size."""
        self._check()
        for start in range(0, len(target), BLOCK_BYTES):
            part = target[start : start + BLOCK_BYTES]
            self._read([_Span(tensor, offset + start, len(part), offset)], part)

    def _read(self, spans: Sequence[_Span], target: Bytes) -> None:
        """Reads and checks spans of one dtype that fill the target."""
        memory, fds = target.data, self._source_fds
        starts = []
        start = 0
        for tensor, offset, size, _ in spans:
            # Unrolled here: a per-expert adapter has tens of thousands of spans of some 50 KB each.
            if os.preadv(fds[tensor.file], [memory[start : start + size]], offset) != size:
                read_rest(fds[tensor.file], memory[start : start + size], offset)
            starts.append(start)
            start += size
        self.result.bytes_read += start
        if not _is_finite(target, spans[0].tensor):
            raise non_finite(self._first_non_finite(spans, target))
        self._note_zeros(spans, starts, target)

    def _first_non_finite(self, spans: Sequence[_Span], target: Bytes) -> TensorEntry:
        start = 0
        for tensor, _, size, _ in spans:
            if not _is_finite(target[start : start + size], tensor):
                return tensor
            start += size
        raise AssertionError("one of them was found to be not finite")

    def _note_zeros(self, spans: Sequence[_Span], starts: Sequence[int], target: Bytes) -> None:
        nonzero, seen = self.result.nonzero, self.result.seen
        # The first byte decides for nearly all tensors that are not zero, and the next few for nearly all others.
        for span, start, first in zip(spans, starts, target[list(starts)].tolist(), strict=True):
            tensor, offset, size, matrix_offset = span
            seen.add(tensor.index)
            end = start + size
            if first or target[start : min(start + FEW_BYTES, end)].any() or target[start:end].any():
                nonzero.add(tensor.index)
                if matrix_offset >= 0:
                    self.result.nonzero_parts.add((tensor.index, matrix_offset))
            else:
                self.result.zero_parts.add((tensor.index, offset if matrix_offset < 0 else matrix_offset))


def _batches(regions: Sequence[Region]) -> Iterator[tuple[list[_Span], int]]:
    """The bytes of regions of whole rows, in batches of a block at most, and the size of each batch."""
    batch: list[_Span] = []
    used = 0
    for region in regions:
        # Unrolled here, too.
        tensor, begin, end = region.tensor, region.row_begin, region.row_end
        offset, size = tensor.offset, tensor.size_bytes
        if begin or end * tensor.shape[-1] * FLOAT_BYTES[tensor.dtype] != size:
            offset, size = _row_offset(tensor, begin), _row_offset(tensor, end) - _row_offset(tensor, begin)
        if used + size <= BLOCK_BYTES:
            if size:
                batch.append(_Span(tensor, offset, size))
            used += size
            continue
        first, end = offset, offset + size
        while offset < end:
            size = end - offset
            if used == BLOCK_BYTES or (batch and used + size > BLOCK_BYTES >= size):
                yield batch, used
                batch, used = [], 0
            size = min(size, BLOCK_BYTES - used)
            batch.append(_Span(tensor, offset, size, first))
            offset, used = offset + size, used + size
    if batch:
        yield batch, used


def _row_offset(tensor: TensorEntry, row: int) -> int:
    return tensor.offset + row * tensor.num_columns * FLOAT_BYTES[tensor.dtype]


def _is_range(values: Sequence[int]) -> bool:
    return all(value == values[0] + index for index, value in enumerate(values))


def _is_finite(raw: Bytes, tensor: TensorEntry) -> bool:
    return is_finite(raw.view(NUMPY_DTYPE[tensor.dtype]), tensor.dtype)
