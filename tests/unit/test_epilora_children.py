"""A supervised process: started again, but not for ever."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from epilora.cli.children import EXIT_NOT_STARTED, Child, ChildSpec, descendants
from epilora.restarts import Restarts

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"])
child.wait()
"""
CHILD_SECONDS = 20


def test_a_process_started_by_a_child_is_a_descendant() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {PARENT!r}])"]
    )
    try:
        deadline = time.monotonic() + CHILD_SECONDS
        while len(descendants(parent.pid)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        for process in descendants(parent.pid):
            process.kill()
        parent.kill()
        parent.wait()
    assert descendants(parent.pid) == []


async def given_up(directory: Path, *, max_restarts: int, final: int = -1, path: str | None = None) -> tuple[int, int]:
    """(exit code, starts) of a process that ends at once with code 3, when it is given up."""
    (directory / "ends_at_once.py").write_text("import sys\nsys.exit(3)\n")
    given_up = asyncio.Event()
    starts = 0

    def prepare() -> dict[str, str]:
        nonlocal starts
        starts += 1
        search = os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])
        # More than the system takes as one variable: no process can be started with it.
        return {**os.environ, "PYTHONPATH": search, **({} if path is None else {"TOO_LONG": path})}

    child = Child(
        ChildSpec(name="ends", module="ends_at_once", stop_seconds=1.0),
        prepare=prepare,
        restarts=Restarts(max_restarts, 60.0),
        is_final=lambda ended: ended.exit_code == final,
        on_given_up=lambda _: given_up.set(),
    )
    child.start()
    async with asyncio.timeout(CHILD_SECONDS):
        await given_up.wait()
    assert child.pid is None
    await child.stop()
    return child.exit_code, starts


@pytest.mark.parametrize("max_restarts", [0, 2])
async def test_what_ends_again_and_again_is_given_up(tmp_path: Path, max_restarts: int) -> None:
    assert await given_up(tmp_path, max_restarts=max_restarts) == (3, max_restarts + 1)


async def test_what_cannot_be_helped_is_given_up_at_once(tmp_path: Path) -> None:
    assert await given_up(tmp_path, max_restarts=2, final=3) == (3, 1)


async def test_a_process_that_the_system_does_not_start_counts_as_ended(tmp_path: Path) -> None:
    assert await given_up(tmp_path, max_restarts=1, path="x" * (1 << 20)) == (EXIT_NOT_STARTED, 2)
