"""Slice files as they are written: front to back, digested on the way.

Bytes are put together in blocks that stay in the cache of one core, where they are read, checked, digested and written
one after the other. A block that another thread digested and wrote would have to be fetched from memory once more.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from epilora.errors import ResourceExhaustedError

BLOCK_BYTES = 256 << 10
"""Most bytes that can be asked for at once."""

Bytes = npt.NDArray[np.uint8]


class SliceFile:
    """A new slice file of mode 0600. A context manager.

    `take` its bytes in order, fill them, and `finish`; or `append` them.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._size = size_bytes
        self._digest = xxhash.xxh3_128()
        self._buffer = np.empty(BLOCK_BYTES, dtype=np.uint8)
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
    def size_bytes(self) -> int:
        """What the file will have."""
        return self._size

    @property
    def position(self) -> int:
        """Offset in the file of the next byte taken."""
        return self._taken

    def take(self, size: int) -> Bytes:
        """The next bytes of the file, BLOCK_BYTES at most, for the caller to fill before it takes more."""
        if self._used + size > BLOCK_BYTES:
            self._flush()
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

    def put_block(self, block: Bytes) -> None:
        """Appends bytes of any number, without a copy."""
        self._flush()
        self.append(block)
        self._taken += len(block)

    def pad_to(self, offset: int) -> None:
        """Zeros up to an offset less than a block away."""
        self.take(offset - self._taken)[:] = 0

    def finish(self) -> None:
        """No more bytes will be taken."""
        assert self._taken == self._size, (self._taken, self._size)
        self._flush()

    def digest(self) -> str:
        """xxh3-128 of the file, 32 hex digits, once all is written. Against accidents, not against forgery."""
        assert self._written == self._size, (self._written, self._size)
        os.ftruncate(self._fd, self._size)
        return self._digest.hexdigest()

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
        self.append(self._buffer[: self._used])
        self._used = 0
