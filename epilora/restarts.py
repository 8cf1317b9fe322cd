"""How often a process that ended is started again: one rule for `epilora serve` and for the launcher of the ranks."""

from __future__ import annotations

import signal
from collections import deque

EXIT_GAVE_UP = 69
"""sysexits.h's EX_UNAVAILABLE: what it had started ended again and again. Starting it once more will not help."""
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
STEADY_SECONDS = 10.0
"""A process that ran this long is started again at once."""


class Restarts:
    """Counts the restarts of one process, or of one group that is started together.

    Args:
        max_restarts: that are allowed within the window; the end after that is for good.
        window_seconds: each restart counts for this long.
    """

    def __init__(self, max_restarts: int, window_seconds: float) -> None:
        self.max_restarts = max_restarts
        self.window_seconds = window_seconds
        self._times: deque[float] = deque()
        self._pause = FIRST_PAUSE_SECONDS

    def next_pause(self, *, started: float, now: float) -> float | None:
        """To be called when the process has ended.

        Args:
            started: when it was started; seconds of any clock.
            now: of the same clock.

        Returns:
            Seconds to wait before it is started again, more each time that it ends soon; None if it is not to be.
        """
        while self._times and now - self._times[0] >= self.window_seconds:
            self._times.popleft()
        if len(self._times) >= self.max_restarts:
            return None
        self._times.append(now)
        if now - started >= STEADY_SECONDS:
            self._pause = FIRST_PAUSE_SECONDS
            return 0.0
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        return pause

    def spent(self) -> str:
        """What a None of `next_pause` means, and which settings change it."""
        return (
            f"it was started again {self.max_restarts} times within {self.window_seconds:g} s and ended once more, "
            "which is the limit (EPILORA_MAX_RESTARTS, EPILORA_RESTART_WINDOW_SECONDS)"
        )


def ending_of(exit_code: int) -> str:
    """How a process ended. Example: 1 -> "exit code 1", -9 -> "SIGKILL"."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"
