"""One service on the demo's checkpoint, as `make run` starts it, for all clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.harness import REPOSITORY, Service

DEMO = REPOSITORY / "examples" / "demo"


@pytest.fixture(scope="session")
def poet() -> Path:
    """The committed per-expert adapter."""
    return DEMO / "per_expert_adapter"


@pytest.fixture(scope="session")
def demo_service(poet: Path) -> Iterator[Service]:
    """Two ranks with the adapter `poet` loaded."""
    with Service(DEMO / "checkpoint", ranks=2, adapter_roots=[DEMO], args=[f"--adapter=poet={poet}"]) as service:
        yield service
