"""`epilora cache`: what a node's loader keeps, and whether it is still what was written."""

from __future__ import annotations

from typing import Annotated

import typer

from epilora.cli.client import Timeout, connected
from epilora.cli.output import EXIT_REFUSED, console, error_console, format_bytes, plain
from epilora.cli.tables import print_table
from epilora.v1 import loader_service_pb2, loader_service_pb2_grpc

Loader = Annotated[
    str,
    typer.Option(
        "--loader",
        envvar="EPILORA_LOADER_ADDRESS",
        metavar="ADDRESS",
        help="Where the loader listens: unix:RUN_DIR/loader.sock on its own machine.",
    ),
]
app = typer.Typer(help="The slice cache of one node, asked of its loader.", no_args_is_help=True)


@app.command()
def show(loader: Loader, timeout: Timeout = 10.0) -> None:
    """Shows entries, bytes, and what was done with Redis."""
    with connected(loader, "loader") as channel:
        stub = loader_service_pb2_grpc.LoaderServiceStub(channel)
        state = stub.GetCache(loader_service_pb2.GetCacheRequest(), timeout=timeout)
    heads = ("entries", "leases", "bytes", "budget", "builds", "Redis: pulled", "given", "lost", "errors")
    cells = (
        str(state.num_entries),
        str(state.num_leases),
        format_bytes(state.used_bytes),
        format_bytes(state.budget_bytes),
        str(state.num_builds),
        str(state.num_redis_pulls),
        str(state.num_redis_pushes),
        str(state.num_redis_losses),
        str(state.num_redis_errors),
    )
    print_table(heads, [cells])


@app.command()
def verify(loader: Loader, timeout: Timeout = 300.0) -> None:
    """Reads every slice back and compares it with its digest. Exit code 1 if one differs; it will be built anew."""
    with connected(loader, "loader") as channel:
        stub = loader_service_pb2_grpc.LoaderServiceStub(channel)
        found = stub.VerifyCache(loader_service_pb2.VerifyCacheRequest(), timeout=timeout)
    for path in found.damaged_paths:
        error_console.print(plain(f"{path} is not what was written", "red"), soft_wrap=True)
    console.print(
        f"{found.num_slices} slices, {format_bytes(found.num_bytes)} read; {len(found.damaged_paths)} damaged"
    )
    if found.damaged_paths:
        raise typer.Exit(EXIT_REFUSED)
