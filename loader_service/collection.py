"""Keeping the collection of cycles away from very many objects."""

from __future__ import annotations

import gc
import threading


class PausedCollection:
    """Collects no cycles while any is entered, in any thread; reference counting goes on.

    An adapter of 36,864 tensors makes some 200,000 objects that live until its slices are written, and none of them is
    part of a cycle. The collector would look through them again and again, for a third of the time. So it rests while
    they are made, and leaves them out afterwards, until `thaw`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_entered = 0

    def __enter__(self) -> None:
        with self._lock:
            self._num_entered += 1
            gc.disable()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_entered -= 1
            if self._num_entered == 0:
                gc.freeze()
                gc.enable()

    def thaw(self) -> None:
        """The objects are not needed any more: what is left is looked through again with all that is old."""
        with self._lock:
            if self._num_entered == 0:
                gc.unfreeze()


paused_collection = PausedCollection()
"""The one of this process."""
