"""The command's parts, put together."""

from __future__ import annotations

import typer

from epilora import __version__
from epilora.cli import adapters, generate, inspect, plan, rebalance, serve, status

app = typer.Typer(
    name="epilora",
    help="Serves many LoRA adapters on one Mixture-of-Experts model with expert parallelism.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(adapters.app, name="adapter")
app.command()(generate.generate)
app.command()(plan.plan)
app.command()(inspect.inspect)
app.command()(inspect.convert)
app.command()(rebalance.rebalance)
app.command()(serve.serve)
app.command()(status.status)


@app.command()
def version() -> None:
    """Prints the version."""
    typer.echo(__version__)


def main() -> None:
    """Entry point. Exit codes: 0 done; 1 refused; 2 wrong usage; 3 not available now, a retry may succeed."""
    app()
