"""Values of Redis, read from the socket to where they belong.

A client library makes an object of each reply, which copies a value two or three times on its way; for values of 1 MiB
that takes longer than to receive them. The library still connects, authenticates, encrypts and writes the commands
here. Only the replies are read without it: those of RESP2 to GETEX, which are a value, nothing, or an error
(https://redis.io/docs/latest/develop/reference/protocol-spec/).
"""

from __future__ import annotations

import socket
from typing import Any, Self

import redis

_MAX_LINE_BYTES = 4096


class ValueStream:
    """Values asked for in turn, read in the same order. A context manager: it takes a connection of a client's pool.

    Args:
        client: speaks RESP2.

    Raises, as all methods: redis.RedisError, OSError.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._pool: Any = client.connection_pool
        connection: Any = self._pool.get_connection()
        self._connection = connection
        self._socket: socket.socket = connection._sock
        self._num_asked = 0
        self._num_left = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None or self._num_asked or self._num_left:
            # What is left of the answers is for nobody else.
            self._connection.disconnect()
        self._pool.release(self._connection)

    def ask(self, name: str, ttl_milliseconds: int) -> None:
        """Asks for a value, and renews its time to live."""
        command = self._connection.pack_command("GETEX", name, "PX", ttl_milliseconds)
        self._connection.send_packed_command(command, check_health=False)
        self._num_asked += 1

    def next_size(self) -> int | None:
        """Bytes of the next value, to be read with `read_into` and `end`; None if there is none of that name."""
        line = self._read_line()
        self._num_asked -= 1
        if line == b"$-1":
            return None
        if line[:1] == b"-":
            raise redis.ResponseError(line[1:].decode(errors="replace"))
        if line[:1] != b"$" or not line[1:].isdigit():
            raise redis.InvalidResponse(f"expected a value, got {bytes(line[:32])!r}")
        self._num_left = int(line[1:])
        return self._num_left

    def read_into(self, block: memoryview) -> None:
        """The value's next bytes, as many as the block has."""
        assert len(block) <= self._num_left, (len(block), self._num_left)
        self._receive(block)
        self._num_left -= len(block)

    def end(self) -> None:
        """The value was read."""
        assert not self._num_left, self._num_left
        if self._read_line():
            raise redis.InvalidResponse("a value is longer than Redis said")

    def _receive(self, block: memoryview) -> None:
        while block:
            count = self._socket.recv_into(block)
            if not count:
                raise redis.ConnectionError("Redis closed the connection")
            block = block[count:]

    def _read_line(self) -> bytes:
        """A line without its end; byte by byte, since what follows belongs elsewhere, and lines are short."""
        line = bytearray()
        while not line.endswith(b"\r\n"):
            if len(line) > _MAX_LINE_BYTES:
                raise redis.InvalidResponse("a line of an answer is too long")
            byte = self._socket.recv(1)
            if not byte:
                raise redis.ConnectionError("Redis closed the connection")
            line += byte
        return bytes(line[:-2])
