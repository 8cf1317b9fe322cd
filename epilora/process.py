"""Ties the life of a process to that of its parent."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int | None = None) -> None:
    """Asks the kernel to end this process with SIGKILL when its parent dies, however that happens.

    Called in the child. The setting survives exec and is not inherited by children.

    Args:
        parent_pid: the parent as it knows itself; if it is gone already, this process ends at once.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(code)}")
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def name_process(name: str) -> None:
    """The name that ps and top show for this process, at most 15 bytes; forks would all have their parent's."""
    Path("/proc/self/comm").write_text(name)


def main() -> None:
    """`python -m epilora.process PARENT_PID MODULE ARGS...`: runs a module that does not outlive its parent.

    A preexec function would do the same, but must not be used in a process with threads.
    PARENT_PID 0: the parent is whoever started it.
    """
    parent_pid, module = int(sys.argv[1]), sys.argv[2]
    die_with_parent(parent_pid or None)
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
