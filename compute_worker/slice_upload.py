"""Slice files to the memory of a device: read by several threads into pinned memory, and copied from there.

That is for a file's first load; pages that are registered with the device are copied from as they are. Each thread
has two buffers and takes the file's chunks in turn: it reads one while the other is on its way to the device, on a
stream beside the running step. Python does nothing in between that takes longer than a few microseconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import torch

from epilora.errors import InternalError
from epilora.reading import read_fully

CHUNK_BYTES = 4 << 20
"""That are read and copied at once: what a core has in its cache is copied from there."""
_MAX_THREADS = 8
_WIDEST_ITEM = 4


class SliceUploader:
    """Reads slice files into tensors. One upload at a time.

    Args:
        device: where the tensors are to be; a CPU's are filled the same way, by one thread.
        chunk_bytes: see CHUNK_BYTES.
        num_threads: that read; 0: half of the cores, and _MAX_THREADS at most.
    """

    def __init__(self, device: torch.device, *, chunk_bytes: int = CHUNK_BYTES, num_threads: int = 0) -> None:
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._device = device
        self._chunk_bytes = chunk_bytes
        num_threads = num_threads or max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // 2) if is_cuda else 1)
        self._lanes = [_Lane(chunk_bytes, is_pinned=is_cuda) for _ in range(num_threads)]
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="slice-upload")

    @torch.inference_mode()
    def upload(self, stream: BinaryIO) -> torch.Tensor:
        """The bytes of a slice file, on the device when this returns.

        Returns:
            uint8 [size of the file, rounded up to a multiple of 4], so that it can be viewed in any dtype.

        Raises:
            InternalError: reason BAD_SLICE; the file became shorter.
        """
        size = os.fstat(stream.fileno()).st_size
        with self.on_stream():
            image = torch.empty(_rounded_up(size), dtype=torch.uint8, device=self._device)
        chunks = iter(range(0, size, self._chunk_bytes))
        calls = [self._threads.submit(self._run, lane, stream.fileno(), size, image, chunks) for lane in self._lanes]
        wait(calls)
        self.synchronize()
        for call in calls:
            call.result()
        return image

    @torch.inference_mode()
    def copy(self, chunks: Sequence[torch.Tensor]) -> torch.Tensor:
        """The same from registered pages, which the device fetches by itself: they are read until `synchronize`.

        Args:
            chunks: uint8, the file's bytes in order; each is one copy.
        """
        with self.on_stream():
            image = torch.empty(
                _rounded_up(sum(chunk.numel() for chunk in chunks)), dtype=torch.uint8, device=self._device
            )
            start = 0
            for chunk in chunks:
                image[start : start + chunk.numel()].copy_(chunk, non_blocking=True)
                start += chunk.numel()
        return image

    @torch.inference_mode()
    def _run(self, lane: _Lane, fd: int, size: int, image: torch.Tensor, chunks: Iterator[int]) -> None:
        """Brings chunks over until none is left; which thread takes which does not matter."""
        with self.on_stream():
            for start in chunks:
                end = min(start + self._chunk_bytes, size)
                buffer = lane.next_buffer(end - start)
                _read_exactly(fd, buffer.numpy().data, start)
                image[start:end].copy_(buffer, non_blocking=True)
                lane.sent()

    def synchronize(self) -> None:
        """Waits for what was given to the device on the stream of this uploader."""
        if self._stream is not None:
            self._stream.synchronize()

    def on_stream(self) -> ExitStack:
        """Work given to the device inside goes to the stream of this uploader, in whatever thread."""
        stack = ExitStack()
        if self._stream is not None:
            stack.enter_context(torch.cuda.device(self._device))
            stack.enter_context(torch.cuda.stream(self._stream))
        return stack


def image_bytes(path: Path) -> int:
    """Bytes of what `SliceUploader.upload` returns for a file."""
    return _rounded_up(path.stat().st_size)


def _rounded_up(size: int) -> int:
    return -(-size // _WIDEST_ITEM) * _WIDEST_ITEM


class _Lane:
    """Two buffers of one thread. Those of a GPU are pinned."""

    def __init__(self, chunk_bytes: int, *, is_pinned: bool) -> None:
        self._buffers = [torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(2)]
        self._events = [torch.cuda.Event() if is_pinned else None for _ in range(2)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def next_buffer(self, size: int) -> torch.Tensor:
        """The buffer whose last copy is longest ago, once that is done."""
        self._turn = 1 - self._turn
        event = self._events[self._turn]
        if event is not None:
            event.synchronize()
        return self._buffers[self._turn][:size]

    def sent(self) -> None:
        """Its copy is under way on the current stream."""
        event = self._events[self._turn]
        if event is not None:
            event.record()  # type: ignore[no-untyped-call]


def _read_exactly(fd: int, target: memoryview, offset: int) -> None:
    done = read_fully(fd, target, offset)
    if done < len(target):
        raise InternalError(
            f"a slice file ended at byte {offset + done} while it was copied; its loader never shortens one",
            reason="BAD_SLICE",
        )
