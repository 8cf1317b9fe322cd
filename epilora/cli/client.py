"""What the client commands share: the channel, deadlines, and errors of calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, cast

import grpc
import grpc.aio
import typer

from epilora.cli.output import fail
from epilora.errors import EpiloraError, InvalidArgumentError
from epilora.rpc import DEFAULT_MAX_MESSAGE_BYTES, error_from

Address = Annotated[
    str, typer.Option("--address", envvar="EPILORA_ADDRESS", metavar="HOST:PORT", help="Where the gateway listens.")
]
Timeout = Annotated[float, typer.Option("--timeout", min=0.001, help="Deadline of the call, seconds.")]
DEFAULT_ADDRESS = "127.0.0.1:50051"
_NEVER_REACHED = ("failed to connect", "errors resolving", "dns resolution failed")
"""How gRPC begins to say that no connection came about; it has one code for this and for a connection that was lost."""


@contextmanager
def connected(address: str, service: str = "gateway") -> Iterator[grpc.Channel]:
    """A channel to the gateway, or to another service; errors meanwhile, of its calls above all, end the command."""
    try:
        with channel_to(address, service) as channel:
            yield channel
    except EpiloraError as error:
        raise fail(error) from None


@contextmanager
def channel_to(address: str, service: str = "gateway") -> Iterator[grpc.Channel]:
    """A channel whose calls end with an EpiloraError if they fail, and the command if Ctrl-C is pressed meanwhile."""
    if not address.strip():
        raise InvalidArgumentError(
            f"the address of the {service} is {address!r}, expected HOST:PORT or unix:PATH", reason="BAD_ADDRESS"
        )
    options = [
        ("grpc.max_receive_message_length", DEFAULT_MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", DEFAULT_MAX_MESSAGE_BYTES),
    ]
    with grpc.insecure_channel(address, options=options) as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            raise rpc_error(error, address, service) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def rpc_error(error: grpc.RpcError, address: str, service: str = "gateway") -> EpiloraError:
    """The exception for a failed call."""
    # The sync API's error has the same accessors.
    mapped = error_from(cast(grpc.aio.AioRpcError, error))
    if mapped.code is grpc.StatusCode.UNAVAILABLE and mapped.reason == "UNAVAILABLE":
        if mapped.message.lower().startswith(_NEVER_REACHED):
            mapped.message = f"no {service} answers at {address}: {mapped.message}"
        else:
            mapped.message = f"the connection to the {service} at {address} was lost: {mapped.message}"
    return mapped
