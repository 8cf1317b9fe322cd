"""Memory in use, as the system counts it."""

from __future__ import annotations

import torch

from epilora.process_memory import anonymous_bytes


def used_bytes(device: torch.device) -> int:
    """Bytes of live tensors on a GPU, or anonymous memory for the CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else anonymous_bytes()
