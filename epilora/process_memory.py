"""Memory of this process, as the system counts it."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")


def anonymous_bytes() -> int:
    """Anonymous resident memory (RssAnon): mapped files do not count."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{_STATUS} has no RssAnon")
