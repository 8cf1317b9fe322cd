"""Session-wide switches that must be set before anything is imported."""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    # Triton decides at its first import whether kernels are compiled or interpreted; other libraries import it too.
    os.environ.setdefault("TRITON_INTERPRET", "1")
