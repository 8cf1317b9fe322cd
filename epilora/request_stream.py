"""What a handler reads: requests whose bytes are refused with a reason, streams that can be read to their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio

from epilora.errors import InvalidArgumentError


@dataclass(frozen=True, kw_only=True, slots=True)
class UnreadableRequest:
    """Stands for a request whose bytes are no message of its type."""

    why: str
    """What the deserializer said."""

    def error(self) -> InvalidArgumentError:
        """What the caller is told."""
        return InvalidArgumentError(
            f"the request cannot be read ({self.why}); expected the bytes of that message, strings in UTF-8",
            reason="BAD_REQUEST_BYTES",
        )


def tolerant(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """A deserializer that returns UnreadableRequest instead of raising: what it raises, grpc answers itself, without
    details, and no interceptor sees the call."""
    if deserializer is None:
        return None

    def deserialize(data: bytes) -> Any:
        try:
            return deserializer(data)
        except Exception as error:
            return UnreadableRequest(why=str(error))

    return deserialize


class RequestStream:
    """The requests of one stream, in order.

    A read that is given up loses nothing: the next one gets its message. (Giving up a read of grpc's own iterator ends
    the iterator.)

    Args:
        requests: grpc's iterator, of messages or UnreadableRequest.
    """

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = aiter(requests)
        self._reading: asyncio.Future[Any] | None = None

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Any:
        """The next request.

        Raises:
            StopAsyncIteration: the caller has sent its last one.
            InvalidArgumentError: BAD_REQUEST_BYTES.
        """
        if self._reading is None:
            self._reading = asyncio.ensure_future(anext(self._requests))
        request = await asyncio.shield(self._reading)
        self._reading = None
        if isinstance(request, UnreadableRequest):
            raise request.error()
        return request

    async def discard(self, seconds: float) -> None:
        """Reads on until the caller has sent its last request, and drops what comes; for so many seconds at most."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        await anext(self)
                    except InvalidArgumentError:
                        continue
        except (StopAsyncIteration, TimeoutError, grpc.aio.BaseError):
            return

    def close(self) -> None:
        """Gives up the read under way."""
        if self._reading is not None:
            self._reading.cancel()
