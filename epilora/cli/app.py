"""The command's parts, put together."""

from __future__ import annotations

import typer

from epilora import __version__
from epilora.cli import adapters, cache, generate, offline, plan, rebalance, serve, status

app = typer.Typer(
    name="epilora",
    help="Serves many LoRA adapters on one Mixture-of-Experts model with expert parallelism.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(adapters.app, name="adapter")
app.add_typer(cache.app, name="cache")
app.command()(generate.generate)
app.command()(plan.plan)
offline.add_commands(app)
app.command()(rebalance.rebalance)
app.command()(serve.serve)
app.command()(status.status)


@app.command()
def version() -> None:
    """Prints the version."""
    typer.echo(__version__)
