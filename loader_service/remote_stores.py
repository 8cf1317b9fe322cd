"""Where remote adapters lie: web servers and S3. Each store says what state a file is in, and streams its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from epilora.errors import EpiloraError, InvalidArgumentError, NotFoundError, PermissionDeniedError, UnavailableError

_BLOCK_BYTES = 1 << 20
_FIELD = "source"


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteFile:
    """A file in the state it was in when it was asked for."""

    name: str
    """In the adapter's directory."""
    size_bytes: int
    state: str
    """Changes with the content: an ETag, or the time of the last change."""


class FileStore(Protocol):
    """One remote directory. Methods raise UnavailableError, PermissionDeniedError or InvalidArgumentError."""

    def look(self, name: str) -> RemoteFile | None:
        """The state of a file; None if it is not there."""

    def stream(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        """Its bytes from an offset on. Raises UnavailableError, reason SOURCE_CHANGED, once it is in another state."""

    def close(self) -> None:
        """Closes connections."""


class HttpStore:
    """A directory on a web server that answers HEAD with Content-Length and ETag or Last-Modified, and heeds Range."""

    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        """`url` without a slash at its end."""
        self._url = url
        self._client = httpx.Client(timeout=timeout_seconds, follow_redirects=False)

    def look(self, name: str) -> RemoteFile | None:
        """See FileStore."""
        url = f"{self._url}/{name}"
        with _http_errors(url):
            # A compressed answer would have another length, and ranges of it are of no use.
            answer = self._client.head(url, headers={"Accept-Encoding": "identity"})
        if answer.status_code in (404, 410):
            return None
        _check_status(answer, url, 200)
        state = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
        size = answer.headers.get("Content-Length", "")
        if not state or not size.isdecimal():
            raise InvalidArgumentError(
                f"{url}: the server names neither ETag nor Last-Modified, or no Content-Length; expected both, since a "
                "file that changes must be told from one that does not",
                reason="SOURCE_UNREADABLE",
                field=_FIELD,
            )
        return RemoteFile(name=name, size_bytes=int(size), state=state)

    def stream(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        """See FileStore."""
        url = f"{self._url}/{file.name}"
        headers = {"Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        if not file.state.startswith("W/"):
            headers["If-Match" if file.state.startswith('"') else "If-Unmodified-Since"] = file.state
        with _http_errors(url), self._client.stream("GET", url, headers=headers) as answer:
            if answer.status_code == 412:
                raise changed(url)
            _check_status(answer, url, 206 if offset else 200)
            if (answer.headers.get("ETag") or answer.headers.get("Last-Modified")) != file.state:
                raise changed(url)
            # As they come: what waits in a larger buffer is lost when the connection breaks.
            yield from answer.iter_raw()

    def close(self) -> None:
        """See FileStore."""
        self._client.close()


class S3Store:
    """A directory of a bucket, through fsspec's s3fs; credentials as boto finds them."""

    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        """`url` s3://bucket/prefix, without a slash at its end."""
        import fsspec

        self._url = url
        options = {"connect_timeout": timeout_seconds, "read_timeout": timeout_seconds}
        try:
            self._files: Any = fsspec.filesystem("s3", config_kwargs=options)
        except ImportError as error:
            raise InvalidArgumentError(
                f"{url}: s3:// needs the package s3fs, which is not installed: pip install 'epilora[s3]'",
                reason="SOURCE_UNSUPPORTED",
                field=_FIELD,
            ) from error

    def look(self, name: str) -> RemoteFile | None:
        """See FileStore."""
        url = f"{self._url}/{name}"
        with _s3_errors(url):
            try:
                info = self._files.info(url, refresh=True)
            except FileNotFoundError:
                return None
            if info["type"] != "file":
                return None
            return RemoteFile(name=name, size_bytes=int(info["size"]), state=str(info["ETag"]))

    def stream(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        """See FileStore."""
        url = f"{self._url}/{file.name}"
        with _s3_errors(url), self._files.open(url, "rb", block_size=8 << 20, cache_type="readahead") as stream:
            if self.look(file.name) != file:
                raise changed(url)
            stream.seek(offset)
            while block := stream.read(_BLOCK_BYTES):
                yield block

    def close(self) -> None:
        """See FileStore: fsspec keeps its connections for the next time."""


def changed(url: str) -> UnavailableError:
    """The error for a file that is not in the state any more in which it was found."""
    return UnavailableError(
        f"{url} was changed while it was being loaded; load it again once it is written",
        reason="SOURCE_CHANGED",
        retry_after_seconds=1.0,
    )


def unreachable(url: str, error: Exception) -> UnavailableError:
    """The error for a store that does not answer."""
    return UnavailableError(
        f"{url} cannot be read: {error or type(error).__name__}; try again",
        reason="SOURCE_UNAVAILABLE",
        retry_after_seconds=5.0,
    )


def _check_status(answer: httpx.Response, url: str, expected: int) -> None:
    status = answer.status_code
    if status == expected:
        return
    message = f"{url}: the server answered {status} {answer.reason_phrase}, expected {expected}"
    error: EpiloraError
    if status in (401, 403):
        error = PermissionDeniedError(message, reason="SOURCE_FORBIDDEN", field=_FIELD)
    elif status in (404, 410):
        error = NotFoundError(message, reason="SOURCE_NOT_FOUND", field=_FIELD)
    elif status >= 500 or status in (408, 429):
        error = UnavailableError(message, reason="SOURCE_UNAVAILABLE", retry_after_seconds=5.0)
    else:
        error = InvalidArgumentError(message, reason="SOURCE_UNREADABLE", field=_FIELD)
    raise error


@contextmanager
def _http_errors(url: str) -> Iterator[None]:
    try:
        yield
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise InvalidArgumentError(f"{url}: {error}", reason="BAD_SOURCE", field=_FIELD) from error
    except httpx.HTTPError as error:
        raise unreachable(url, error) from error


@contextmanager
def _s3_errors(url: str) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise PermissionDeniedError(f"{url}: {error}", reason="SOURCE_FORBIDDEN", field=_FIELD) from error
    except EpiloraError:
        raise
    except Exception as error:  # botocore's errors share no class with anything
        raise unreachable(url, error) from error
