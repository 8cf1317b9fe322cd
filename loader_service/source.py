"""Finding and opening an adapter's files, inside the allowed roots only."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote, urlsplit

from epilora.adapters.peft_config import MAX_CONFIG_BYTES
from epilora.adapters.safetensors_header import header_digest, read_header_bytes
from epilora.errors import AdapterFormatError, InvalidArgumentError, NotFoundError, PermissionDeniedError

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_FIELD = "source"


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceIdentity:
    """What tells one state of an adapter's files from another, without reading the weights."""

    weights_stat: tuple[int, ...]
    """Device, inode, size, mtime in ns and ctime in ns of the weights file."""
    config_digest: str
    header_digest: str

    @property
    def digest(self) -> str:
        """Of all of it, 64 hex digits."""
        canonical = json.dumps([self.weights_stat, self.config_digest, self.header_digest])
        return hashlib.sha256(canonical.encode()).hexdigest()


class SourceFiles:
    """An adapter's files, open. Use as a context manager."""

    def __init__(self, *, config: bytes, weights_fd: int, weights_name: str, header: bytes) -> None:
        self.config = config
        """Content of adapter_config.json."""
        self.weights_fd = weights_fd
        self.weights_name = weights_name
        """For messages."""
        self.header = header
        """JSON of the safetensors header."""
        self.file_bytes = os.fstat(weights_fd).st_size
        self.identity = SourceIdentity(
            weights_stat=_stat_identity(weights_fd),
            config_digest=hashlib.sha256(config).hexdigest(),
            header_digest=header_digest(header),
        )

    def is_unchanged(self) -> bool:
        """False if the weights file was written to since it was opened."""
        return _stat_identity(self.weights_fd) == self.identity.weights_stat

    def __enter__(self) -> SourceFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.weights_fd)


class SourceRoots:
    """The directories under which adapters may lie."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = [Path(os.path.realpath(root)) for root in roots]

    def open(self, source: str, *, max_header_bytes: int) -> SourceFiles:
        """Opens an adapter's files.

        Links are followed; what they lead to must lie under a root, too.

        Args:
            source: absolute path, or file:// URL, of the directory.
            max_header_bytes: limit of the safetensors header.

        Raises:
            InvalidArgumentError: not such a path, or not an adapter.
            PermissionDeniedError: outside the roots.
            NotFoundError: no such directory.
        """
        directory = self._directory(source)
        config = self._read_config(directory)
        weights = directory / WEIGHTS_NAME
        fd = self._open_file(weights)
        if fd is None:
            raise _no_weights(directory)
        try:
            header = read_header_bytes(fd, where=str(weights), max_header_bytes=max_header_bytes)
            return SourceFiles(config=config, weights_fd=fd, weights_name=str(weights), header=header)
        except BaseException:
            os.close(fd)
            raise

    def _directory(self, source: str) -> Path:
        path = Path(os.path.realpath(_path_of(source)))
        self._check_inside(path, source)
        if not path.is_dir():
            raise NotFoundError(f"adapter directory {source} does not exist", reason="SOURCE_NOT_FOUND", field=_FIELD)
        return path

    def _check_inside(self, path: Path, named: object) -> None:
        if any(path.is_relative_to(root) for root in self._roots):
            return
        allowed = ", ".join(map(str, self._roots)) or "none (EPILORA_ADAPTER_ROOTS is empty)"
        raise PermissionDeniedError(
            f"{named} is outside the directories that adapters may be loaded from: {allowed}",
            reason="SOURCE_OUTSIDE_ROOTS",
            field=_FIELD,
        )

    def _read_config(self, directory: Path) -> bytes:
        path = directory / CONFIG_NAME
        fd = self._open_file(path)
        if fd is None:
            raise AdapterFormatError(
                f"{directory} has no {CONFIG_NAME}; expected the directory of an adapter that PEFT saved",
                reason="NO_ADAPTER_CONFIG",
                field=_FIELD,
            )
        with os.fdopen(fd, "rb") as stream:
            content = stream.read(MAX_CONFIG_BYTES + 1)
        if len(content) > MAX_CONFIG_BYTES:
            raise AdapterFormatError(
                f"{path} has more than {MAX_CONFIG_BYTES} bytes", reason="BAD_ADAPTER_CONFIG", field=_FIELD
            )
        return content

    def _open_file(self, path: Path) -> int | None:
        """A descriptor of a regular file under a root; None if there is no such file."""
        try:
            # Not blocking: opening a FIFO would wait for a writer.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise AdapterFormatError(
                f"{path} cannot be opened: {error.strerror}", reason="SOURCE_UNREADABLE", field=_FIELD
            ) from error
        try:
            # Asked of the descriptor, so that no link can be changed between the check and the reading.
            self._check_inside(Path(os.readlink(f"/proc/self/fd/{fd}")), path)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise AdapterFormatError(f"{path} is not a file", reason="SOURCE_UNREADABLE", field=_FIELD)
        except BaseException:
            os.close(fd)
            raise
        return fd


def _path_of(source: str) -> str:
    path = source
    if "://" in source:
        url = urlsplit(source)
        if url.scheme != "file" or url.netloc not in ("", "localhost") or url.query or url.fragment:
            raise InvalidArgumentError(
                f"source {source!r}: expected an absolute path or a file:///path URL", reason="BAD_SOURCE", field=_FIELD
            )
        path = unquote(url.path)
    if not os.path.isabs(path) or "\0" in path or len(os.fsencode(path)) > 4096:
        raise InvalidArgumentError(
            f"source {source[:200]!r}: expected an absolute path or a file:///path URL",
            reason="BAD_SOURCE",
            field=_FIELD,
        )
    return path


def _no_weights(directory: Path) -> AdapterFormatError:
    names = sorted(entry.name for entry in directory.iterdir())
    similar = [name for name in names if name.endswith((".safetensors", ".bin", ".pt", ".index.json"))]
    found = (
        f"found {', '.join(similar[:5])}; sharded and pickled weights are not supported" if similar else "found none"
    )
    return AdapterFormatError(f"{directory} has no {WEIGHTS_NAME}: {found}", reason="NO_ADAPTER_WEIGHTS", field=_FIELD)


def _stat_identity(fd: int) -> tuple[int, ...]:
    status = os.fstat(fd)
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
