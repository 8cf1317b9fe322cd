"""Pages for slice files, allocated while the adapter is still being understood.

Of writing a file to shared memory, more than half is the kernel finding and clearing pages. Understanding an adapter of
36,864 tensors keeps one core busy for some tenths of a second; another one can do that part of the writing meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

LEAST_BYTES = 64 << 20
"""Below that, a thread is not worth it."""
_STEP_BYTES = 4 << 20


class PageAllocation:
    """Makes new files and gives them pages, in a thread, while the block runs. What is too much is cut off later."""

    def __init__(self, sizes: Mapping[Path, int]) -> None:
        """`sizes`: what each file will have, about."""
        self._sizes = sizes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slice-pages")

    def __enter__(self) -> PageAllocation:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        fds = {path: os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600) for path in self._sizes}
        try:
            # All files at once, since they are written at once, front to back.
            for start in range(0, max(self._sizes.values(), default=0), _STEP_BYTES):
                for path, size in self._sizes.items():
                    if self._stop.is_set():
                        return
                    if start < size:
                        os.posix_fallocate(fds[path], start, min(_STEP_BYTES, size - start))
        except OSError:
            return  # whoever writes meets the same error, and can say what is to be done
        finally:
            for fd in fds.values():
                os.close(fd)
