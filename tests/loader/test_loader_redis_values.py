"""ValueStream against a server whose answers the test writes: what a real Redis says only when something is wrong."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from loader_service.redis_values import ValueStream


class Server:
    """Answers the first command on each connection with fixed bytes, and closes it."""

    def __init__(self, path: Path) -> None:
        self.answer = b""
        self.num_connections = 0
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.num_connections += 1
            # A client that has read enough may have left.
            with connection, suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(self.answer)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "s")
    yield made
    made.close()


@pytest.fixture
def client(tmp_path: Path, server: Server) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(tmp_path / "s"), protocol=2, socket_timeout=5, driver_info=None)


def first_value(client: redis.Redis, size: int) -> bytes | None:
    with ValueStream(client) as values:
        values.ask("a", 1000)
        found = values.next_size()
        if found is None:
            return None
        block = bytearray(size)
        values.read_into(memoryview(block))
        values.end()
        return bytes(block)


def test_a_value_and_none(server: Server, client: redis.Redis) -> None:
    server.answer = b"$3\r\nabc\r\n"
    assert first_value(client, 3) == b"abc"
    server.answer = b"$-1\r\n"
    assert first_value(client, 3) is None


@pytest.mark.parametrize(
    "answer, error",
    [
        (b"-LOADING Redis is loading\r\n", "LOADING"),
        (b"*1\r\n", "expected a value"),
        (b"$x\r\n", "expected a value"),
        (b"$" + b"1" * 5000, "too long"),
        (b"$3\r\nabcdef\r\n", "longer than Redis said"),
        (b"$3\r\nab", "closed the connection"),
        (b"$", "closed the connection"),
        (b"", "closed the connection"),
    ],
)
def test_other_answers_are_errors_of_redis(server: Server, client: redis.Redis, answer: bytes, error: str) -> None:
    server.answer = answer
    with pytest.raises(redis.RedisError, match=error):
        first_value(client, 3)
    # What was left of the answer is not read by whoever has the connection next.
    server.answer = b"$3\r\nxyz\r\n"
    assert first_value(client, 3) == b"xyz"
