"""The Node client against a real service."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.service.harness import REPOSITORY, Service

CLIENT = REPOSITORY / "examples" / "clients" / "node"
PROMPT = "Q: Who keeps the lamp?\nA:"
PLAIN = "Marta keeps it. She climbs the stairs twice a day."
POET = "A quiet hand that winds the light each dusk."


@pytest.fixture(scope="module")
def installed() -> Path:
    """The client with its packages, exactly those of the lock file."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    subprocess.run(["npm", "ci", "--silent"], cwd=CLIENT, check=True, timeout=240, stdin=subprocess.DEVNULL)
    return CLIENT


def _run(client: Path, service: Service, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["node", "client.js", "--address", service.address, "--prompt", PROMPT, *options]
    return subprocess.run(command, cwd=client, check=False, capture_output=True, text=True, timeout=120)


def test_streams_the_base_models_answer(installed: Path, demo_service: Service) -> None:
    done = _run(installed, demo_service)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == PLAIN
    assert "FINISH_REASON_STOP: 10 tokens in" in done.stderr


def test_loads_an_adapter_and_streams_its_answer(installed: Path, demo_service: Service, poet: Path) -> None:
    done = _run(installed, demo_service, "--adapter", "node", "--source", str(poet))
    demo_service.unload("node")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == POET
    assert "per_expert experts" in done.stderr


def test_max_tokens_ends_the_answer(installed: Path, demo_service: Service) -> None:
    done = _run(installed, demo_service, "--max-tokens", "3")
    assert done.returncode == 0, done.stderr
    assert "FINISH_REASON_LENGTH: 10 tokens in, 3 out" in done.stderr


def test_prints_the_details_of_an_error(installed: Path, demo_service: Service) -> None:
    done = _run(installed, demo_service, "--adapter", "nobody")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("NOT_FOUND: ")
    assert '"reason":"ADAPTER_NOT_FOUND"' in done.stderr
    assert '"field":"adapter_name"' in done.stderr


def test_says_so_when_nobody_listens(installed: Path) -> None:
    command = ["node", "client.js", "--address", "127.0.0.1:1", "--prompt", PROMPT, "--timeout", "5"]
    done = subprocess.run(command, cwd=installed, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(("UNAVAILABLE: ", "DEADLINE_EXCEEDED: "))


def test_the_lock_file_names_no_registry() -> None:
    assert '"resolved"' not in (CLIENT / "package-lock.json").read_text()
