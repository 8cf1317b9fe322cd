"""Kernels compiled for a GPU that need not be there: none may want more shared memory than a program can have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need triton")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_launch_fits_an_h200(tmp_path: Path) -> None:
    """Three real shapes, 1 to 16,384 tokens, without adapters and with lora ranks up to the largest."""
    # The interpreter, which other tests run kernels in, compiles nothing.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernel_compile"],
        cwd=ROOT,
        env={**env, "TRITON_CACHE_DIR": str(tmp_path)},
        check=False,
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert len(done.stdout.splitlines()) == 54
