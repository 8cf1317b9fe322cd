"""What the command refuses by itself, before any service is asked or started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from epilora.cli import adapters

REPOSITORY = Path(__file__).resolve().parents[2]


def run(*args: str | bytes, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command: Sequence[str | bytes] = [sys.executable, "-m", "epilora.cli", *args]
    kept = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "COLUMNS": "200", "NO_COLOR": "1", "PYTHONUTF8": "1"}
    return subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**kept, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "args, words",
    [
        (["generate", "a", "--max-tokens", "99999999999"], "--max-tokens"),
        (["generate", "--ids", "1,99999999999"], "99999999999"),
        (["generate", "a", "--seed", "99999999999999999999"], "--seed"),
        (["generate", b"\xff\xfe"], "expected UTF-8"),
    ],
)
def test_wrong_usage_is_one_error(args: list[str | bytes], words: str) -> None:
    failed = run(*args)
    assert failed.returncode == 2, failed.stderr
    assert words in failed.stderr
    assert "Traceback" not in failed.stderr


def test_a_relative_source_is_meant_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert adapters._absolute("a/b") == str(tmp_path.resolve() / "a" / "b")
    assert adapters._absolute("/a/b") == "/a/b"
    assert adapters._absolute("file:///a/b") == "file:///a/b"


def test_commands_that_look_at_files_do_without_the_others_imports() -> None:
    """They would take longer than the command itself."""
    code = (
        "import sys; sys.argv = ['epilora', 'inspect', '--help']\n"
        "from epilora.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    print([n for n in ('grpc_status', 'structlog', 'pydantic_settings') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=REPOSITORY, timeout=60
    )
    assert "Directory with adapter_config.json" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
