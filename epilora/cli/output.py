"""What all commands share: consoles, exit codes, and errors as one clear block."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from epilora.errors import EpiloraError

EXIT_REFUSED = 1
EXIT_UNAVAILABLE = 3

# What is printed may hold names of users and files: neither markup nor emoji codes are looked for in any of it.
console = Console(markup=False, emoji=False)
error_console = Console(stderr=True, markup=False, emoji=False)


def plain(text: str, style: str = "") -> Text:
    """Text that may hold anything, such as names of a foreign file: what would steer the terminal becomes an escape.

    A table folds it where a column is too narrow, and cuts nothing off.
    """
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    return Text(shown, style=style, overflow="fold")


def print_error(code: str, reason: str, message: str) -> None:
    """One block on stderr: code and reason, then the message."""
    error_console.print(Text.assemble((f"error: {code}", "bold red"), f" ({reason})" if reason else ""))
    error_console.print(plain(f"  {message}"), soft_wrap=True)


def fail(error: EpiloraError, *, as_json: bool = False, adapter: Path | None = None) -> typer.Exit:
    """Prints an error and gives the exit to raise.

    Args:
        error: what went wrong.
        as_json: as one JSON object on stdout, in place of the block on stderr.
        adapter: the adapter that could not be looked at, for the JSON object; None: it was something else.
    """
    if as_json:
        said = {"code": error.code.name, "reason": error.reason, "message": error.message}
        typer.echo(json.dumps({"path": None if adapter is None else str(adapter), "error": said}, indent=2))
    else:
        print_error(error.code.name, error.reason, error.message)
    return typer.Exit(EXIT_UNAVAILABLE if error.retry_may_help else EXIT_REFUSED)


def format_bytes(count: int) -> str:
    """ "1.5 MiB" for people."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
