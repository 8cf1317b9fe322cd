"""The error that a process ended with, left in the run directory for whoever started it; exit codes say too little."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import grpc

from epilora.errors import EpiloraError, FailedPreconditionError, error_class_for

LOADER, WORKERS, GATEWAY = "loader", "workers", "gateway"
"""Processes by name; the ranks of a group share one."""


def path_of_last_error(run_dir: Path, process: str) -> Path:
    """Its file: {"code": ..., "reason": ..., "message": ...}."""
    return run_dir / f"{process}-error.json"


def leave_last_error(run_dir: Path, process: str, error: EpiloraError | OSError) -> None:
    """Writes it. An earlier one stays, which may be its cause, unless only this one says that a retry is useless."""
    if isinstance(error, OSError):
        error = FailedPreconditionError(str(error), reason="CANNOT_START")
    earlier = read_last_error(run_dir, process)
    if earlier is not None and (error.retry_may_help or not earlier.retry_may_help):
        return
    path = path_of_last_error(run_dir, process)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    # Nobody may be there to read it, and the process has logged it.
    with suppress(OSError):
        temporary.write_text(json.dumps({"code": error.code.name, "reason": error.reason, "message": error.message}))
        os.replace(temporary, path)


def read_last_error(run_dir: Path, process: str) -> EpiloraError | None:
    """The error; None if the process left none, because it was killed or crashed."""
    try:
        found = json.loads(path_of_last_error(run_dir, process).read_text())
        return error_class_for(grpc.StatusCode[found["code"]])(found["message"], reason=found["reason"])
    except (OSError, ValueError, KeyError):
        return None


def forget_last_error(run_dir: Path, process: str) -> None:
    """To be called before the process is started: an error left is then of this time."""
    with suppress(OSError):
        path_of_last_error(run_dir, process).unlink(missing_ok=True)
