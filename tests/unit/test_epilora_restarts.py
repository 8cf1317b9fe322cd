"""How often something is started again, and what is said when it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from epilora.errors import FailedPreconditionError, UnavailableError
from epilora.last_error import WORKERS, forget_last_error, leave_last_error, read_last_error
from epilora.restarts import STEADY_SECONDS, Restarts, ending_of


def test_pauses_grow_up_to_the_limit() -> None:
    restarts = Restarts(4, 60.0)
    pauses = [restarts.next_pause(started=now, now=now + 0.5) for now in (0.0, 1.0, 2.0, 3.0, 4.0)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, None]
    assert restarts.next_pause(started=5.0, now=59.0) is None
    assert "4 times within 60 s" in restarts.spent()


def test_restarts_count_for_the_window_only() -> None:
    restarts = Restarts(2, 60.0)
    for now in range(0, 3001, 30):
        assert restarts.next_pause(started=now - STEADY_SECONDS, now=now) == 0.0
    # 2970 and 3000 count; the first of them until 3030.
    assert restarts.next_pause(started=3000, now=3029) is None
    assert restarts.next_pause(started=3029, now=3030) == 0.1
    assert restarts.next_pause(started=3030, now=3031) is None


def test_none_may_be_allowed() -> None:
    assert Restarts(0, 60.0).next_pause(started=0.0, now=1e6) is None


@pytest.mark.parametrize("code, words", [(0, "exit code 0"), (78, "exit code 78"), (-9, "SIGKILL"), (-50, "signal 50")])
def test_endings_are_said(code: int, words: str) -> None:
    assert ending_of(code) == words


def test_the_cause_is_kept(tmp_path: Path) -> None:
    assert read_last_error(tmp_path, WORKERS) is None
    leave_last_error(tmp_path, WORKERS, UnavailableError("a peer is gone", reason="FIRST"))
    leave_last_error(tmp_path, WORKERS, UnavailableError("another", reason="SECOND"))
    found = read_last_error(tmp_path, WORKERS)
    assert found is not None
    assert (found.code.name, found.reason, found.message) == ("UNAVAILABLE", "FIRST", "a peer is gone")
    # A retry does not help this one, whatever else went wrong.
    leave_last_error(tmp_path, WORKERS, FailedPreconditionError("no weights", reason="THIRD"))
    for later in (UnavailableError("a peer is gone", reason="FOURTH"), OSError("disk full")):
        leave_last_error(tmp_path, WORKERS, later)
        found = read_last_error(tmp_path, WORKERS)
        assert found is not None
        assert (found.reason, found.retry_may_help) == ("THIRD", False)
    forget_last_error(tmp_path, WORKERS)
    assert read_last_error(tmp_path, WORKERS) is None
    leave_last_error(tmp_path, WORKERS, OSError(13, "Permission denied", "/cache"))
    found = read_last_error(tmp_path, WORKERS)
    assert found is not None
    assert found.message == "[Errno 13] Permission denied: '/cache'"
    # Nobody may have made the directory.
    leave_last_error(tmp_path / "none", WORKERS, found)
    assert not (tmp_path / "none").exists()
