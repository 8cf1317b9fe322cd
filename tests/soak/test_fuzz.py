"""The readers of adapters under ten minutes of wrong files."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FUZZ_SECONDS = 600.0
EXAMPLES_PER_ROUND = "3000"
MAX_MEMORY_BYTES = 8 << 30
ROUND_SECONDS = 900

pytestmark = [pytest.mark.soak, pytest.mark.timeout(FUZZ_SECONDS + ROUND_SECONDS)]


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))


def test_readers_survive_many_wrong_files() -> None:
    """No crash, no hang, and no allocation that a limit of the address space would refuse; each round has its seed."""
    start = time.monotonic()
    seed = time.time_ns() % (1 << 32)
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", str(ROUND_SECONDS), "tests/unit/test_epilora_fuzz.py"]
    while time.monotonic() - start < FUZZ_SECONDS:
        done = subprocess.run(
            [*command, f"--hypothesis-seed={seed}"],
            cwd=ROOT,
            env={**os.environ, "EPILORA_FUZZ_EXAMPLES": EXAMPLES_PER_ROUND},
            check=False,
            capture_output=True,
            text=True,
            timeout=ROUND_SECONDS,
            preexec_fn=_limit_memory,
        )
        assert done.returncode == 0, f"seed {seed}:\n{done.stdout[-8000:]}"
        seed = (seed + 1) % (1 << 32)
