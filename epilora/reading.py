"""Reading a part of a file whole."""

from __future__ import annotations

import os


def read_fully(fd: int, target: memoryview, offset: int) -> int:
    """Fills a buffer from an offset of a file, in as many calls as it takes.

    Returns:
        Bytes read; fewer than the buffer has only if the file ends before.
    """
    done = 0
    while done < len(target):
        count = os.preadv(fd, [target[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done
