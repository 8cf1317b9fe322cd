"""The readers of adapters under about ten minutes of wrong files."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_MEMORY_BYTES = 8 << 30

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


def test_readers_survive_many_wrong_files() -> None:
    """No crash, no hang, and no allocation that a limit of the address space would refuse."""

    def limit_memory() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--timeout", "1700", "tests/unit/test_epilora_fuzz.py"],
        cwd=ROOT,
        env={**os.environ, "EPILORA_FUZZ_EXAMPLES": "9000"},
        check=False,
        capture_output=True,
        text=True,
        timeout=1750,
        preexec_fn=limit_memory,
    )
    assert done.returncode == 0, done.stdout[-8000:]
