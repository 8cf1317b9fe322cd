"""A worker that is stopped or killed while it takes a slice: right bytes or a clear error, and nothing is left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loader.test_loader_killed import ROOT, write_inputs

pytestmark = pytest.mark.soak


def test_a_worker_stopped_at_each_step_of_taking_a_slice(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    command = [sys.executable, "-m", "tests.soak.killed_worker", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=300)
    steps = [json.loads(line) for line in result.stdout.splitlines() if line.startswith(b"{")]
    assert [step["name"] for step in steps[::2]] == ["open", "open", "fcntl.flock", *["mmap.__new__"] * 3]
    for step in steps:
        assert step["stopped"], step
        assert (step["used"], step["exists"]) == (0, False), step
        if step["ending"] == "SIGKILL":
            assert step["answer"] is None, step
        elif step["freed"]:
            # Its file had gone before it was locked, or it had it open and read on.
            assert step["answer"].get("reason") == "SLICE_GONE" or step["answer"]["digest"] == step["digest"], step
        else:
            assert step["answer"]["digest"] == step["digest"], step
    assert any(step["freed"] == 0 for step in steps), "a slice that is mapped is not freed"
    assert any(step["freed"] for step in steps)
