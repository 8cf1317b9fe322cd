"""Slice files as they are written: front to back, digested on the way, by a thread of their own.

Bytes are put together in blocks that fit a processor's cache. While the next block is read and checked, the writing
thread digests the last one and copies it to the filesystem, so that neither costs another pass over memory.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from epilora.errors import ResourceExhaustedError

BLOCK_BYTES = 2 << 20
"""Most bytes that can be asked for at once."""

Bytes = npt.NDArray[np.uint8]


class BlockWriter:
    """Writes blocks of slice files in a thread, in the order given. Use as a context manager."""

    def __init__(self, num_files: int) -> None:
        self._free: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        # One for every file that is being filled, and two under way.
        for _ in range(num_files + 2):
            self._free.put(np.empty(BLOCK_BYTES, dtype=np.uint8))
        self._full: queue.SimpleQueue[tuple[SliceFile, Bytes, int] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="slice-writer")

    def __enter__(self) -> BlockWriter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._full.put(None)
        self._thread.join()

    def buffer(self) -> Bytes:
        """A free buffer of BLOCK_BYTES; waits for one. Raises what a write has raised."""
        buffer = self._free.get()
        self.check()
        return buffer

    def write(self, file: SliceFile, buffer: Bytes, size: int) -> None:
        """Appends the first bytes of a buffer to a file and frees the buffer, later."""
        self._full.put((file, buffer, size))

    def check(self) -> None:
        """Raises what a write has raised."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (block := self._full.get()) is not None:
            file, buffer, size = block
            try:
                if self._error is None:
                    file.append(buffer[:size])
            except BaseException as error:  # raised by check in the thread that builds
                self._error = error
            finally:
                self._free.put(buffer)


class SliceFile:
    """A new slice file of mode 0600. `take` its bytes in order, fill them, and `finish`. A context manager.

    Without a writer its bytes are given to `append`.
    """

    def __init__(self, path: Path, size_bytes: int, writer: BlockWriter | None = None) -> None:
        self._path = path
        self._size = size_bytes
        self._writer = writer
        self._digest = xxhash.xxh3_128()
        self._buffer: Bytes | None = None
        self._used = 0
        self._taken = 0
        self._written = 0
        # It is there already if it was given pages in advance (allocation.py).
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def __enter__(self) -> SliceFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @property
    def position(self) -> int:
        """Offset in the file of the next byte taken."""
        return self._taken

    def take(self, size: int) -> Bytes:
        """The next bytes of the file, BLOCK_BYTES at most, for the caller to fill before it takes more."""
        if self._buffer is None or self._used + size > BLOCK_BYTES:
            assert self._writer is not None
            self._flush()
            self._buffer = self._writer.buffer()
        view = self._buffer[self._used : self._used + size]
        self._used += size
        self._taken += size
        return view

    def put(self, values: Sequence[int] | bytes | Bytes) -> None:
        """Appends bytes that are there already."""
        source = np.frombuffer(values, dtype=np.uint8) if isinstance(values, bytes) else np.asarray(values)
        for start in range(0, len(source), BLOCK_BYTES):
            part = source[start : start + BLOCK_BYTES]
            self.take(len(part))[:] = part

    def pad_to(self, offset: int) -> None:
        """Zeros up to an offset less than a block away."""
        self.take(offset - self._taken)[:] = 0

    def finish(self) -> None:
        """No more bytes will be taken."""
        assert self._taken == self._size, (self._taken, self._size)
        self._flush()

    def digest(self) -> str:
        """xxh3-128 of the file, 32 hex digits, once the writer has ended. Against accidents, not against forgery."""
        assert self._written == self._size, (self._written, self._size)
        os.ftruncate(self._fd, self._size)
        return self._digest.hexdigest()

    @property
    def written(self) -> int:
        """Bytes that `append` has written."""
        return self._written

    def append(self, block: Bytes) -> None:
        """Writes a block at the end.

        Raises:
            ResourceExhaustedError: reason CACHE_FULL; the filesystem has no room.
        """
        self._digest.update(block.data)
        done = 0
        try:
            while done < len(block):
                done += os.pwrite(self._fd, block[done:].data, self._written + done)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise
            raise ResourceExhaustedError(
                f"no room for {self._size} bytes in {self._path.parent.parent}: {error.strerror}", reason="CACHE_FULL"
            ) from error
        self._written += done

    def _flush(self) -> None:
        if self._buffer is not None:
            assert self._writer is not None
            self._writer.write(self, self._buffer, self._used)
        self._buffer, self._used = None, 0
