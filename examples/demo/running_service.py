"""`epilora serve` as a child process for as long as a `with` block lasts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 300.0
STOP_SECONDS = 60.0
POLL_SECONDS = 0.1
ROOT = Path(__file__).resolve().parents[2]


class NotReadyError(Exception):
    """The service did not come up; the message ends with its last error, and names its log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningService:
    """Where it listens."""

    address: str
    metrics: str


@contextmanager
def running_service(
    *, model: Path, num_ranks: int, dtype: str, adapter_roots: list[Path], directory: Path
) -> Iterator[RunningService]:
    """Starts all processes on free ports, waits until they serve, and stops them at the end.

    Args:
        model: directory of the checkpoint.
        num_ranks: ranks to spread the experts over.
        dtype: of the served weights.
        adapter_roots: directories under which adapters may lie.
        directory: for its registry, its log (service.log) and its ready file.

    Raises:
        NotReadyError: it ended, or was not ready in time.
    """
    log_path, ready_file = directory / "service.log", directory / "ready.json"
    command = [sys.executable, "-m", "epilora.cli", "serve", "--model", str(model), "--ranks", str(num_ranks)]
    command += ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    command += ["--state-dir", str(directory / "state"), "--ready-file", str(ready_file)]
    command += ["--dtype", dtype, "--start-timeout", str(START_SECONDS)]
    for root in adapter_roots:
        command += ["--adapter-root", str(root)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EPILORA_")}
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        ready = _wait_until_ready(process, ready_file, log_path)
        yield RunningService(address=ready["address"], metrics=ready["metrics"])
    finally:
        _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], ready_file: Path, log_path: Path) -> dict[str, str]:
    deadline = time.monotonic() + START_SECONDS
    while not ready_file.exists():
        if process.poll() is not None:
            ended = f"the service ended with exit status {process.returncode} before it was ready"
            raise NotReadyError(f"{ended}: {_last_error(log_path)}; see {log_path}")
        if time.monotonic() > deadline:
            late = f"the service was not ready within {START_SECONDS:g} s"
            raise NotReadyError(f"{late}: {_last_error(log_path)}; see {log_path}")
        time.sleep(POLL_SECONDS)
    ready: dict[str, str] = json.loads(ready_file.read_text())
    return ready


def _last_error(log_path: Path) -> str:
    """What it said last of why it ended: its block that begins with "error:", else its last line."""
    lines = log_path.read_text(errors="replace").splitlines()
    begins = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    # The message is the line after code and reason.
    said = lines[begins[-1] : begins[-1] + 2] if begins else lines[-1:]
    return " ".join(line.removeprefix("error: ").strip() for line in said) or "it said nothing"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, which drains and ends all processes in order; SIGKILL if that takes too long: they die together."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_SECONDS)
