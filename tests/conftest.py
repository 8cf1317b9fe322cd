"""Session-wide switches that must be set before anything is imported."""

import os
import sys
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():
    # Triton decides at its first import whether kernels are compiled or interpreted; other libraries import it too.
    os.environ.setdefault("TRITON_INTERPRET", "1")

_finished: list[pytest.Session] = []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Notes the session, for its exit status."""
    _finished.append(session)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the process here: what gRPC's event loop leaves behind may wait for ever when it is collected.

    All is reported by now. A process of pytest-xdist has still to say goodbye, and ends by itself.
    """
    if _finished and not hasattr(config, "workerinput"):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(_finished[0].exitstatus))
