"""A real redis-server on a free port, plain or with TLS and a password, that a test may kill and start again."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
import redis

PASSWORD = "an example"
_START_SECONDS = 10.0


class RedisServer:
    """Started by `start`; nothing of it outlives `kill`."""

    def __init__(self, directory: Path, *options: str, tls: bool = False) -> None:
        if shutil.which("redis-server") is None:
            pytest.skip("redis-server is not installed (Debian package redis-server)")
        directory.mkdir()
        self._directory = directory
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self._options = ["--port", str(self._port), *options]
        if tls:
            certificate, key = _make_certificate(directory)
            files = ["--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", certificate]
            self._options = ["--port", "0", "--tls-port", str(self._port), *files, "--tls-auth-clients", "no", *options]
            self._options += ["--requirepass", PASSWORD]
            password = PASSWORD.replace(" ", "%20")
            self.url = f"rediss://:{password}@127.0.0.1:{self._port}/0?ssl_ca_certs={certificate}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it, empty, and waits until it answers."""
        fixed = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(self._directory)]
        command = ["redis-server", *fixed, *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.ConnectionError:
                assert self._process.poll() is None, "redis-server ended"
                assert time.monotonic() < deadline
                time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL. Harmless if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def client(self) -> redis.Redis:
        """To look at it with."""
        return redis.Redis.from_url(self.url)


def _make_certificate(directory: Path) -> tuple[str, str]:
    """Self-signed, for 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    certificate, key = str(directory / "server.crt"), str(directory / "server.key")
    options = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=test"]
    files = ["-keyout", key, "-out", certificate, "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", "req", "-x509", *options, *files], check=True, capture_output=True)
    return certificate, key
