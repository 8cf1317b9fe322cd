"""Matrices that lie side by side in the source are read by one call, however far apart they go in a slice file.

In a per-expert file A and B of all projections of an expert follow each other; in a slice file each has a tensor of its
own. Read one by one they take tens of thousands of calls, and before and after each a thread waits for the others to
let it have the interpreter. So a few megabytes of a slice file are put together at a time, by few calls that need it.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from epilora.adapters.normal_form import NUMPY_DTYPE, GridRegions
from epilora.adapters.slice_plan import Piece
from epilora.adapters.values import is_finite, non_finite
from epilora.errors import AbortedError
from epilora.reading import read_fully
from epilora.slices import ALIGNMENT
from loader_service.slice_file import Bytes, SliceFile
from loader_service.write_result import WriteResult

GATHER_BYTES = 8 << 20
"""Of a slice file, put together at a time: a layer's share on each of 8 ranks is about half of that."""
_MAX_VECTORS = 512
FEW_BYTES = 64
"""They decide for nearly all matrices that are not zero."""


class BlockWriter:
    """Blocks on their way to slice files. A context manager.

    With a thread of its own, which digests and writes a block while the next one is being filled.
    """

    def __init__(self, *, has_thread: bool) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slice-blocks") if has_thread else None
        # Memory is there once it is touched: an adapter that is not gathered takes none.
        self._free = [np.empty(GATHER_BYTES + ALIGNMENT, dtype=np.uint8) for _ in range(2 if has_thread else 1)]
        self._under_way: deque[tuple[Future[None], Bytes]] = deque()

    def __enter__(self) -> BlockWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        self.drain()

    def buffer(self) -> Bytes:
        """GATHER_BYTES, and a gap before them, to fill; raises what writing an earlier block has raised."""
        if not self._free:
            self._take_back()
        return self._free[-1]

    def write(self, file: SliceFile, size: int) -> None:
        """Appends the first bytes of the buffer to a file."""
        if self._thread is None:
            file.put_block(self._free[-1][:size])
            return
        buffer = self._free.pop()
        self._under_way.append((self._thread.submit(file.put_block, buffer[:size]), buffer))

    def drain(self) -> None:
        """Waits until all blocks are in their files."""
        while self._under_way:
            self._take_back()

    def _take_back(self) -> None:
        written, buffer = self._under_way.popleft()
        self._free.append(buffer)
        written.result()


class _Part(NamedTuple):
    """Some bytes of a slice file."""

    offset: int
    """In the slice file."""
    size_bytes: int
    regions: GridRegions | None
    constant: bytes


class Gatherer:
    """Gathers what follows each other in one slice file."""

    def __init__(self, file: SliceFile, source_fd: int, blocks: BlockWriter, result: WriteResult) -> None:
        self._file = file
        self._fd = source_fd
        self._blocks = blocks
        self._result = result
        self._parts: list[_Part] = []
        self._end = -1
        """Of the last block, which may be on its way still; -1 if there is none."""

    def takes(self, piece: Piece) -> bool:
        """True for whole tensors of one size, each less than a block, and for constants among them."""
        if isinstance(piece.regions, GridRegions):
            return bool(piece.regions.matrix_bytes <= GATHER_BYTES)
        return bool(self._parts) and bool(piece.constant)

    def add(self, piece: Piece) -> None:
        """Adds what comes next in the file."""
        for part in _parts(piece):
            if self._parts and part.offset + part.size_bytes - self._parts[0].offset > GATHER_BYTES:
                self._flush()
            self._parts.append(part)

    def settle(self) -> None:
        """Everything that was added is in the file, which can be written to directly.

        Raises:
            AdapterFormatError: reason NON_FINITE.
            AbortedError: reason SOURCE_CHANGED.
            ResourceExhaustedError: reason CACHE_FULL.
        """
        self._flush()
        if self._end >= 0:
            self._blocks.drain()
            self._end = -1

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if not parts:
            return
        start = self._end if self._end >= 0 else self._file.position
        buffer = self._blocks.buffer()
        end = 0
        for part in parts:
            buffer[end : part.offset - start] = 0  # less than ALIGNMENT
            end = part.offset - start + part.size_bytes
            if part.constant:
                buffer[end - part.size_bytes : end] = np.frombuffer(part.constant, dtype=np.uint8)
        gathered = [(part.offset - start, part.regions) for part in parts if part.regions is not None]
        _read(self._fd, gathered, buffer)
        for offset, regions in gathered:
            size = len(regions) * regions.matrix_bytes
            self._check(regions, buffer[offset : offset + size])
            self._result.bytes_read += size
        self._end = start + end
        self._blocks.write(self._file, end)

    def _check(self, regions: GridRegions, block: Bytes) -> None:
        """Values are finite; notes which matrices are zero."""
        matrices = block.reshape(len(regions), -1)
        if not is_finite(block.view(NUMPY_DTYPE[regions.dtype]), regions.dtype):
            wrong = next(
                place
                for place, matrix in enumerate(matrices)
                if not is_finite(matrix.view(NUMPY_DTYPE[regions.dtype]), regions.dtype)
            )
            raise non_finite(regions[wrong].tensor)
        self._result.seen.update(regions.rows.tolist())
        # A few bytes decide for nearly all matrices that are not zero.
        is_set: npt.NDArray[np.bool_] = np.asarray(matrices[:, :FEW_BYTES].any(axis=1))
        for place in np.flatnonzero(~is_set):
            is_set[place] = matrices[place].any()
        self._result.nonzero.update(regions.rows[is_set].tolist())


def _parts(piece: Piece) -> Iterator[_Part]:
    """A piece in parts of a block at most."""
    if not isinstance(piece.regions, GridRegions):
        yield _Part(piece.offset, piece.size_bytes, None, piece.constant)
        return
    size = piece.regions.matrix_bytes
    per_part = GATHER_BYTES // size
    for begin in range(0, len(piece.regions), per_part):
        regions = piece.regions.part(begin, begin + per_part)
        yield _Part(piece.offset + begin * size, len(regions) * size, regions, b"")


def _read(fd: int, gathered: Sequence[tuple[int, GridRegions]], buffer: Bytes) -> None:
    """Reads matrices to where they belong in the buffer, those that follow each other in the file by one call."""
    if not gathered:
        return
    sources = np.concatenate([regions.offsets for _, regions in gathered])
    sizes = np.concatenate([np.full(len(regions), regions.matrix_bytes) for _, regions in gathered])
    targets = np.concatenate([offset + regions.matrix_bytes * np.arange(len(regions)) for offset, regions in gathered])
    order = np.argsort(sources)
    sources, sizes, targets = sources[order], sizes[order], targets[order]
    memory = buffer.data
    views = [memory[begin:end] for begin, end in zip(targets.tolist(), (targets + sizes).tolist(), strict=True)]
    bounds = [0, *(1 + np.flatnonzero(sources[1:] != sources[:-1] + sizes[:-1])).tolist(), len(views)]
    for begin, end in itertools.pairwise(bounds):
        for first in range(begin, end, _MAX_VECTORS):
            _read_run(fd, views[first : min(first + _MAX_VECTORS, end)], int(sources[first]))


def _read_run(fd: int, views: Sequence[memoryview], offset: int) -> None:
    size = sum(map(len, views))
    if os.preadv(fd, views, offset) == size:
        return
    for view in views:
        read_rest(fd, view, offset)
        offset += len(view)


def read_rest(fd: int, buffer: memoryview, offset: int) -> None:
    """Reads again what one call did not read whole.

    Raises:
        AbortedError: reason SOURCE_CHANGED; the file has fewer bytes.
    """
    done = read_fully(fd, buffer, offset)
    if done < len(buffer):
        raise AbortedError(
            f"the adapter's weights ended at byte {offset + done} while they were read: the file was changed",
            reason="SOURCE_CHANGED",
        )
