"""The agent that keeps a group of ranks running, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from epilora.last_error import WORKERS, read_last_error
from epilora.restarts import EXIT_GAVE_UP
from epilora.settings_errors import EXIT_BAD_SETTINGS

ROOT = Path(__file__).resolve().parents[2]
STOPPED_SECONDS = 1.0
SECONDS = 60.0


class Group:
    """An agent and its two sleeping ranks."""

    def __init__(self, directory: Path, *args: str, max_restarts: int = 100) -> None:
        self._directory = directory
        command = [sys.executable, "-m", "tests.worker_loop.sleeping_ranks", str(directory), str(STOPPED_SECONDS)]
        self.agent = subprocess.Popen([*command, str(max_restarts), *args], cwd=ROOT)

    def ranks(self, attempt: int) -> dict[int, int]:
        """Process ids by rank of the ranks that were started at an attempt, once they are there."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline and self.agent.poll() is None:
            lines = [path.read_text().split() for path in self._directory.glob("rank-*")]
            found = {int(rank): int(pid) for rank, number, pid in lines if int(number) == attempt}
            if len(found) == 2:
                return found
            time.sleep(0.02)
        raise AssertionError(f"attempt {attempt} was not started")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    """Runs a group for one test."""
    group = Group(tmp_path)
    family: list[psutil.Process] = []
    try:
        yield group
        family = psutil.Process(group.agent.pid).children()
        assert len(family) == 2
        group.agent.send_signal(signal.SIGTERM)
        assert group.agent.wait(SECONDS) == 3
        assert not any(process.is_running() for process in family), "a rank outlives its agent"
    finally:
        for process in family:
            process.kill() if process.is_running() else None
        group.agent.kill()
        group.agent.wait(SECONDS)


def test_a_group_that_is_lost_too_often_is_given_up(tmp_path: Path) -> None:
    group = Group(tmp_path, max_restarts=1)
    try:
        os.kill(group.ranks(0)[1], signal.SIGTERM)
        last = group.ranks(1)
        os.kill(last[0], signal.SIGKILL)
        assert group.agent.wait(SECONDS) == EXIT_GAVE_UP
    finally:
        group.agent.kill()
        group.agent.wait(SECONDS)
    assert not any(psutil.pid_exists(pid) for pid in last.values())
    error = read_last_error(tmp_path, WORKERS)
    assert error is not None
    assert error.message.startswith("rank 0 ended with SIGKILL")


def test_a_rank_that_cannot_start_is_not_started_again(tmp_path: Path) -> None:
    group = Group(tmp_path, "no weights")
    try:
        assert group.agent.wait(SECONDS) == EXIT_BAD_SETTINGS
    finally:
        group.agent.kill()
        group.agent.wait(SECONDS)
    assert len(list(tmp_path.glob("rank-*"))) <= 2
    error = read_last_error(tmp_path, WORKERS)
    assert error is not None
    assert (error.message, error.reason) == ("no weights", "TEST")


def test_a_group_that_lost_a_rank_starts_anew_and_costs_nothing_meanwhile(group: Group) -> None:
    first = group.ranks(0)
    agent = psutil.Process(group.agent.pid)
    before, start = sum(agent.cpu_times()[:2]), time.monotonic()
    time.sleep(1.5)
    assert (sum(agent.cpu_times()[:2]) - before) / (time.monotonic() - start) < 0.03
    os.kill(first[1], signal.SIGKILL)
    second = group.ranks(1)
    assert not psutil.pid_exists(first[0])
    # Nobody in the group notices, but it goes on all the same.
    for pid in second.values():
        os.kill(pid, signal.SIGSTOP)
    third = group.ranks(2)
    assert not set(third.values()) & set(second.values())
    assert not any(psutil.pid_exists(pid) for pid in second.values())
