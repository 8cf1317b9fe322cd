"""Commands run in this process."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from epilora.cli.app import app


def run_command(*arguments: object, code: int = 0) -> str:
    """All output of a command that ends with this exit code."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.output


def error_of(*arguments: object) -> dict[str, Any]:
    """What is on stdout of a command that fails: JSON, and nothing on stderr."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert (result.exit_code, result.stderr) == (1, ""), result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found
