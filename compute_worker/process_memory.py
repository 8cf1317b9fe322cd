"""Memory in use, as the system counts it."""

from __future__ import annotations

from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process (RssAnon): mapped files do not count."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{_STATUS} has no RssAnon")


def used_bytes(device: torch.device) -> int:
    """Bytes of live tensors on a GPU, or anonymous memory for the CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else anonymous_bytes()
