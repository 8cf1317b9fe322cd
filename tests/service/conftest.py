"""Fixtures of the tests that run whole services."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.service.harness import REPOSITORY, Service

FIXTURES = REPOSITORY / "tests" / "fixtures"


@pytest.fixture(scope="session")
def models() -> Path:
    """Directory of the tiny checkpoints."""
    return FIXTURES / "models"


@pytest.fixture(scope="session")
def adapters() -> Path:
    """Directory of the adapters that real writers wrote."""
    return FIXTURES / "adapters"


@pytest.fixture
def start_service(adapters: Path) -> Iterator[Callable[..., Service]]:
    """Starts services that end with the test."""
    with ExitStack() as services:

        def start(model: Path, **options: Any) -> Service:
            options.setdefault("adapter_roots", [adapters])
            return services.enter_context(Service(model, **options))

        yield start


@pytest.fixture(scope="session")
def scratch_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that adapters may lie under, for those that tests write."""
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="session")
def service(models: Path, adapters: Path, scratch_root: Path) -> Iterator[Service]:
    """Two ranks of the tiny Qwen3-MoE, shared by many tests; each test leaves no adapter behind."""
    with Service(
        models / "qwen3moe-T", ranks=2, adapter_roots=[adapters, scratch_root, REPOSITORY / "examples"]
    ) as running:
        yield running
