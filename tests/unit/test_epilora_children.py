"""Whose children a process has."""

from __future__ import annotations

import subprocess
import sys
import time

from epilora.cli.children import children, descendants

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"])
child.wait()
"""
CHILD_SECONDS = 20


def test_a_process_started_by_a_child_is_a_descendant_only() -> None:
    # A worker that compiles kernels starts compilers; they must not be counted as workers.
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {PARENT!r}])"]
    )
    try:
        deadline = time.monotonic() + CHILD_SECONDS
        while len(descendants(parent.pid)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (child,) = children(parent.pid)
        assert {child.pid} < {process.pid for process in descendants(parent.pid)}
    finally:
        for process in descendants(parent.pid):
            process.kill()
        parent.kill()
        parent.wait()
    assert children(parent.pid) == []
