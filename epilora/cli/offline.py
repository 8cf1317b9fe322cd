"""The commands that look at files and need no service: nothing of gRPC's client or of the settings is imported."""

from __future__ import annotations

import typer

from epilora.cli import inspect


def add_commands(app: typer.Typer) -> None:
    """Adds them to a command."""
    app.command()(inspect.inspect)
    app.command()(inspect.convert)


app = typer.Typer(name="epilora", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
add_commands(app)
