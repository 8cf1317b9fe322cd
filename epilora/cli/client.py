"""What the client commands share: the channel, deadlines, and errors as one clear block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, cast

import grpc
import grpc.aio
import typer
from rich.console import Console
from rich.text import Text

from epilora.errors import EpiloraError
from epilora.rpc import DEFAULT_MAX_MESSAGE_BYTES, error_from

EXIT_REFUSED = 1
EXIT_UNAVAILABLE = 3
_RETRY_MAY_HELP = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.ABORTED)

Address = Annotated[
    str, typer.Option("--address", envvar="EPILORA_ADDRESS", metavar="HOST:PORT", help="Where the gateway listens.")
]
Timeout = Annotated[float, typer.Option("--timeout", min=0.001, help="Deadline of the call, seconds.")]
DEFAULT_ADDRESS = "127.0.0.1:50051"

console = Console()
error_console = Console(stderr=True)


def print_error(code: str, reason: str, message: str) -> None:
    """One block on stderr: code and reason, then the message."""
    error_console.print(Text.assemble((f"error: {code}", "bold red"), f" ({reason})" if reason else ""))
    error_console.print(Text(f"  {message}"), soft_wrap=True)


def fail(error: EpiloraError) -> typer.Exit:
    """Prints an error and gives the exit to raise."""
    print_error(error.code.name, error.reason, error.message)
    return typer.Exit(EXIT_UNAVAILABLE if error.code in _RETRY_MAY_HELP else EXIT_REFUSED)


@contextmanager
def connected(address: str) -> Iterator[grpc.Channel]:
    """A channel to the gateway; errors of the calls made with it end the command."""
    options = [
        ("grpc.max_receive_message_length", DEFAULT_MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", DEFAULT_MAX_MESSAGE_BYTES),
    ]
    with grpc.insecure_channel(address, options=options) as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            raise fail(rpc_error(error, address)) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def rpc_error(error: grpc.RpcError, address: str) -> EpiloraError:
    """The exception for a failed call."""
    # The sync API's error has the same accessors.
    mapped = error_from(cast(grpc.aio.AioRpcError, error))
    if mapped.code is grpc.StatusCode.UNAVAILABLE and mapped.reason == "UNAVAILABLE":
        mapped.message = f"no gateway answers at {address}: {mapped.message}"
    return mapped


def format_bytes(count: int) -> str:
    """ "1.5 MiB" for people."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
