"""A web server on a free port: a directory over HTTP with ETags and ranges, and the few answers of a Hugging Face Hub.

`break_after` cuts connections off in the middle of a file, so that a download has to go on.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_INFO = re.compile(r"/api/models/([\w.-]+/[\w.-]+)/revision/([\w.-]+)")
_FILE = re.compile(r"/([\w.-]+/[\w.-]+)/resolve/([0-9a-f]{40})/(.+)")


class RemoteStub:
    """What the server has, and what was asked of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.requests: Counter[str] = Counter()
        """By method and name of the file, with " range" where a part was asked for."""
        self.break_after = 0
        """Bytes of each answer after which the connection ends; 0: never."""
        self.status = 0
        """Answered to everything, if not 0."""
        self.url = ""

    @contextmanager
    def running(self) -> Iterator[RemoteStub]:
        """Serves while the block runs."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def _handler(stub: RemoteStub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            if stub.status:
                self._end(stub.status)
            elif match := _INFO.fullmatch(self.path):
                self._describe(match[1], match[2])
            elif match := _FILE.fullmatch(self.path):
                self._send_file(stub.directory / match[1] / match[3])
            else:
                self._send_file(stub.directory / self.path.lstrip("/"))

        def _describe(self, repo_id: str, revision: str) -> None:
            stub.requests[f"{self.command} info"] += 1
            repository = stub.directory / repo_id
            if not repository.is_dir() or revision not in ("main", COMMIT):
                self.send_response(404)
                self.send_header("X-Error-Code", "RevisionNotFound" if repository.is_dir() else "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            names = sorted(str(path.relative_to(repository)) for path in repository.rglob("*") if path.is_file())
            siblings = [{"rfilename": name} for name in names]
            body = json.dumps({"id": repo_id, "sha": COMMIT, "siblings": siblings}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _send_file(self, path: Path) -> None:
            wanted = self.headers.get("Range", "")
            stub.requests[f"{self.command} {path.name}{' range' if wanted else ''}"] += 1
            if not path.is_file():
                self._end(404)
                return
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()}"'
            if self.headers.get("If-Match", etag) != etag:
                self._end(412)
                return
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
            self.send_response(206 if wanted else 200)
            if wanted:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(content) - start))
            self.send_header("ETag", etag)
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "HEAD":
                return
            if stub.break_after and len(content) - start > stub.break_after:
                self.wfile.write(content[start : start + stub.break_after])
                self.close_connection = True
            else:
                self.wfile.write(content[start:])

        def _end(self, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

    return Handler
